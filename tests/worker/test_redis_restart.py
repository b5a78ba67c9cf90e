"""The worker outlives its Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, Cancelled, Tokens
from tests.latch import Latch
from tests.services import (
    RedisServer,
    WorkerProcess,
    begun,
    held_ids,
    own_redis,
    running_worker,
    wait_until,
)

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


def reconnects(worker: WorkerProcess) -> int:
    return worker.text().count("Connected to redis")


def test_an_idle_worker_serves_on_after_redis_was_restarted(
    server: RedisServer, worker: WorkerProcess, client: Client
) -> None:
    client.submit(prompt="x", max_tokens=2).result(GET_S)
    server.halt()
    server.start()
    jobs = [client.submit(prompt="x", max_tokens=2) for _ in range(6)]
    for job in jobs:
        assert job.result(GET_S).text == "w0 w1 "
    running = begun(client.submit(prompt="x", max_tokens=4000))
    running.cancel()
    with pytest.raises(Cancelled):
        running.result(GET_S)
    wait_until(lambda: worker.card() is not None)


def test_a_job_that_runs_while_redis_restarts_is_delivered_once_and_whole(
    server: RedisServer, worker: WorkerProcess, client: Client, latch: Latch
) -> None:
    job = begun(client.submit(prompt=latch.prompt(after=299), max_tokens=300))
    server.halt()
    latch.open()
    server.start()
    assert job.result(GET_S).attempts == 1
    events = [entry.event for entry in job.stream(timeout=GET_S)]
    ids = [i for event in events if isinstance(event, Tokens) for i in event.ids]
    assert ids == list(range(300))
    assert [event.type for event in events].count("finished") == 1
    assert [event.type for event in events].count("started") == 1
    wait_until(lambda: not held_ids(client.redis), what="the acknowledgement")


def test_jobs_that_run_through_a_reconnect_still_fill_their_slots(
    server: RedisServer, worker: WorkerProcess, client: Client
) -> None:
    running = [begun(client.submit(prompt="x", max_tokens=4000)) for _ in range(2)]
    server.halt()
    server.start()
    wait_until(lambda: reconnects(worker) == 2)
    queued = client.submit(prompt="x", max_tokens=2)
    running[0].cancel()
    assert queued.result(GET_S).text == "w0 w1 "
    order = [worker.text().index(f"{job.id}] ") for job in (*running, queued)]
    ignored = worker.text().index(f"{running[0].id}] ignored")
    assert order == sorted(order)
    assert worker.text().index(f"{queued.id}] received") > ignored
    running[1].cancel()
    wait_until(lambda: not held_ids(client.redis))


def test_a_job_that_waits_for_its_time_survives_a_reconnect(
    server: RedisServer, worker: WorkerProcess, client: Client
) -> None:
    with Celery("stock", broker=server.url, set_as_current=False) as stock:
        kwargs = {"prompt": "x", "max_tokens": 2}
        sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue="llorch.toy", countdown=3)
    wait_until(lambda: f"{sent.id}] received" in worker.text())
    server.halt()
    server.start()
    assert client.job(sent.id).result(GET_S).text == "w0 w1 "


def test_a_worker_that_celery_started_before_its_redis_serves_once_it_is_there(
    tmp_path: Path,
) -> None:
    server = RedisServer()
    worker = WorkerProcess(server.url, tmp_path / "early.log", model_name="toy")
    try:
        wait_until(lambda: "Cannot connect to redis" in worker.text())
        server.start()
        wait_until(worker.card, what="the worker to announce itself")
        with Client(server.url) as client:
            assert client.submit(prompt="x", max_tokens=2).result(GET_S).text == "w0 w1 "
    finally:
        worker.stop()
        server.remove()
