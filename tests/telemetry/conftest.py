"""A collector, and workers that send their spans to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateways import GatewayProcess, running_gateway
from tests.services import RedisServer, WorkerProcess, running_worker
from tests.telemetry.collector import Collector, running_collector


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def traced_worker(
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
    collector: Collector,
) -> Iterator[WorkerProcess]:
    """A toy worker that logs all it can, as JSON: model ``toy``, four jobs at once."""
    with running_worker(
        redis_server.url,
        tmp_path_factory.mktemp("traced"),
        loglevel="DEBUG",
        model_name="toy",
        max_sequences=4,
        TOY_STEP_MS=5,
        log_format="json",
        **collector.environment(),
    ) as worker:
        yield worker


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[GatewayProcess]:
    """A gateway that logs as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in collector.environment().items():
            patch.setenv(name, str(value))
        patch.setenv("LLORCH_LOG_FORMAT", "json")
        with running_gateway(redis_server.url, tmp_path_factory.mktemp("gateway")) as process:
            yield process
