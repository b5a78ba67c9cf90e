"""The worker outlives its Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.client import Client
from llorch_worker.contract import Cancelled, Tokens
from tests.services import RedisServer, WorkerProcess, own_redis, running_worker, wait_until

GET_S = 60


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with own_redis(append_only=True) as server:
        yield server


@pytest.fixture
def worker(server: RedisServer, tmp_path: Path) -> Iterator[WorkerProcess]:
    options: dict[str, Any] = {"model_name": "toy", "max_sequences": 2, "TOY_STEP_MS": 5}
    with running_worker(server.url, tmp_path, **options) as worker:
        yield worker


@pytest.fixture
def client(server: RedisServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def test_an_idle_worker_serves_on_after_redis_was_restarted(
    server: RedisServer, worker: WorkerProcess, client: Client
) -> None:
    client.submit(prompt="x", max_tokens=2).result(GET_S)
    server.halt()
    server.start()
    jobs = [client.submit(prompt="x", max_tokens=2) for _ in range(6)]
    for job in jobs:
        assert job.result(GET_S).text == "w0 w1 "
    running = client.submit(prompt="x", max_tokens=4000)
    for entry in running.stream(timeout=GET_S):
        if isinstance(entry.event, Tokens):
            break
    running.cancel()
    with pytest.raises(Cancelled):
        running.result(GET_S)
    wait_until(lambda: worker.card() is not None)


def test_a_job_that_runs_while_redis_restarts_is_delivered_once_and_whole(
    server: RedisServer, worker: WorkerProcess, client: Client
) -> None:
    job = client.submit(prompt="x", max_tokens=300)
    for entry in job.stream(timeout=GET_S):
        if isinstance(entry.event, Tokens):
            break
    server.halt()
    server.start()
    assert job.result(GET_S).attempts == 1
    events = [entry.event for entry in job.stream(timeout=GET_S)]
    ids = [i for event in events if isinstance(event, Tokens) for i in event.ids]
    assert ids == list(range(300))
    assert [event.type for event in events].count("finished") == 1
