"""A Redis of its own for each test, a proxy before it, workers that go when the test ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.registry import ModelCard
from llorch_worker.client import Client
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.faults.witness import Witness
from tests.services import RedisServer, WorkerProcess, own_redis

LEASE_S = 1.0
SWEEP_S = 0.5
"""Short, so that tests need not wait; the defaults are ten times these."""
QUICK = {"TOY_STEP_MS": 1}
"""Of a worker that has nothing to do but end what another one left."""


class StartWorker(Protocol):
    def __call__(
        self, name: str = "w1", *, url: str | None = None, ready: bool = True, **options: Any
    ) -> WorkerProcess:
        """A worker of the model ``toy``, at ``url`` or else straight at the server."""
        ...


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with own_redis(append_only=True) as server:
        yield server


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(LOCALHOST, server.port) as proxy:
        yield proxy


@pytest.fixture
def client(server: RedisServer) -> Iterator[Client]:
    # As if a worker had served the model before.
    card = ModelCard(name="toy", max_context=4096, last_seen=time.time())
    with Client(server.url, model="toy") as client:
        client.redis.hset(keys.MODELS, card.name, card.model_dump_json())
        yield client


@pytest.fixture
def witness(client: Client) -> Iterator[Witness]:
    with Witness(client) as witness:
        yield witness


@pytest.fixture
def start_worker(server: RedisServer, tmp_path: Path) -> Iterator[StartWorker]:
    started: list[WorkerProcess] = []
    usual: dict[str, Any] = {
        "model_name": "toy", "max_sequences": 4, "TOY_STEP_MS": 5,
        "lease_s": LEASE_S, "sweep_s": SWEEP_S,
    }  # fmt: skip

    def start(
        name: str = "w1", *, url: str | None = None, ready: bool = True, **options: Any
    ) -> WorkerProcess:
        log = tmp_path / f"{name}-{len(started)}.log"
        worker = WorkerProcess(url or server.url, log, name=name, **(usual | options))
        started.append(worker)
        return worker.wait_ready() if ready else worker

    yield start
    for worker in started:
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
