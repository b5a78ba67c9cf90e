"""Each test has its own Redis, a proxy in front of it, and workers that end with the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pytest

from llorch_worker.client import Client
from tests.broker.steps import announce
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.faults.witness import Witness
from tests.services import RedisServer, WorkerProcess
from tests.sizes import FULL_SIZE

pytest.register_assert_rewrite(
    "tests.faults.stage", "tests.faults.user_steps", "tests.faults.worker_steps"
)

collect_ignore = [] if FULL_SIZE else ["test_full_size.py"]

LEASE_S = 2.0
SWEEP_S = 0.5
"""A fraction of the defaults, so that tests need not wait; a lease outlives what a busy machine
costs a worker that lives."""
QUICK = {"TOY_STEP_MS": 1}
"""Options of a worker that only finishes the jobs of another one."""


class StartWorker(Protocol):
    def __call__(
        self, name: str = "w1", *, url: str | None = None, ready: bool = True, **options: Any
    ) -> WorkerProcess:
        """A worker of the model ``toy`` at ``url``, by default the server without the proxy."""
        ...


@pytest.fixture
def proxy(own_server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(LOCALHOST, own_server.port) as proxy:
        yield proxy


@pytest.fixture
def client(own_client: Client) -> Client:
    """``own_client``, which accepts jobs of the model ``toy`` before a worker serves it."""
    announce(own_client.redis)
    return own_client


@pytest.fixture
def witness(client: Client) -> Iterator[Witness]:
    with Witness(client) as witness:
        yield witness


@pytest.fixture
def start_worker(own_server: RedisServer, tmp_path: Path) -> Iterator[StartWorker]:
    started: list[WorkerProcess] = []
    usual: dict[str, Any] = {
        "model_name": "toy", "max_sequences": 4, "TOY_STEP_MS": 5,
        "lease_s": LEASE_S, "sweep_s": SWEEP_S,
    }  # fmt: skip

    def start(
        name: str = "w1", *, url: str | None = None, ready: bool = True, **options: Any
    ) -> WorkerProcess:
        log = tmp_path / f"{name}-{len(started)}.log"
        worker = WorkerProcess(url or own_server.url, log, name=name, **(usual | options))
        started.append(worker)
        return worker.wait_ready() if ready else worker

    yield start
    for worker in started:
        with suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
