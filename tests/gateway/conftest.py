"""Gateways over the workers of the module."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.gateways import GatewayProcess, running_gateway
from tests.services import RedisServer, WorkerProcess


@pytest.fixture(scope="module")
def gateway(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway on ``redis_server``, which serves whatever workers the module starts."""
    with running_gateway(redis_server.url, tmp_path_factory.mktemp("gateway")) as process:
        yield process


@pytest.fixture(scope="module")
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    """A plain HTTP client of ``gateway``."""
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture
def own_gateway(
    own_server: RedisServer, own_worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """A gateway for one test, which may stop it, over ``own_worker``."""
    with running_gateway(own_server.url, tmp_path_factory.mktemp("gateway")) as process:
        yield process
