"""The worker outlives its Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.client.stream import StreamEntry
from llorch_worker.contract import TASK_NAME, Cancelled
from tests.latch import Latch
from tests.services import (
    RedisServer,
    WorkerProcess,
    begun,
    own_redis,
    running_worker,
    stock_app,
    token_ids,
    wait_until,
)
from tests.store import held_ids

GET_S = 60
ATTEMPTS_TO_SEND_S = 2.0
"""Longer than Celery tries to send the tasks that follow."""


def reconnects(worker: WorkerProcess) -> int:
    return worker.text().count("Connected to redis")


def test_an_idle_worker_serves_on_after_redis_was_restarted(
    own_server: RedisServer, own_worker: WorkerProcess, own_client: Client
) -> None:
    own_client.submit(prompt="x", max_tokens=2).result(GET_S)
    own_server.halt()
    own_server.start()
    jobs = [own_client.submit(prompt="x", max_tokens=2) for _ in range(6)]
    for job in jobs:
        assert job.result(GET_S).text == "w0 w1 "
    running = begun(own_client.submit(prompt="x", max_tokens=4000))
    running.cancel()
    with pytest.raises(Cancelled):
        running.result(GET_S)
    wait_until(lambda: own_worker.card() is not None)


def test_a_job_whose_next_task_cannot_be_sent_while_redis_is_away_sends_it_later(
    own_server: RedisServer, own_worker: WorkerProcess, own_client: Client, latch: Latch
) -> None:
    with Celery("stock", broker=own_server.url, set_as_current=False) as stock:
        sent = stock.send_task(
            TASK_NAME,
            kwargs={"prompt": latch.prompt(after=299), "max_tokens": 300},
            queue="llorch.toy",
            link=stock.signature("next.task", queue="next"),
        )
    job = begun(own_client.job(sent.id))
    own_server.halt()
    latch.open()
    time.sleep(ATTEMPTS_TO_SEND_S)
    own_server.start()
    assert list(job.result(GET_S).choices[0].token_ids) == list(range(300))
    assert token_ids(job.stream(timeout=GET_S)) == list(range(300))
    assert own_client.redis.llen("next") == 1
    wait_until(lambda: not held_ids(own_client.redis), what="the acknowledgement")


@pytest.fixture
def patient_worker(own_server: RedisServer, tmp_path: Path) -> Iterator[WorkerProcess]:
    """``own_worker``, which looks at its queues only where something tells it to."""
    with running_worker(
        own_server.url, tmp_path, app="tests.worker.patient_app",
        model_name="toy", max_sequences=2, TOY_STEP_MS=5,
    ) as worker:  # fmt: skip
        yield worker


def test_jobs_that_run_through_a_reconnect_still_fill_their_slots(
    own_server: RedisServer, patient_worker: WorkerProcess, own_client: Client
) -> None:
    running = [begun(own_client.submit(prompt="x", max_tokens=4000)) for _ in range(2)]
    own_server.halt()
    own_server.start()
    wait_until(lambda: reconnects(patient_worker) == 2)
    queued = own_client.submit(prompt="x", max_tokens=2)
    running[0].cancel()
    assert queued.result(GET_S).text == "w0 w1 "
    wait_until(lambda: f"{running[0].id}] ignored" in patient_worker.text())
    order = [patient_worker.text().index(f"{job.id}] ") for job in (*running, queued)]
    ignored = patient_worker.text().index(f"{running[0].id}] ignored")
    assert order == sorted(order)
    assert patient_worker.text().index(f"{queued.id}] received") > ignored
    running[1].cancel()
    wait_until(lambda: not held_ids(own_client.redis))


@pytest.mark.parametrize("restart", [False, True])
def test_running_jobs_survive_a_redis_that_loses_all_its_data(
    tmp_path: Path, latch: Latch, restart: bool
) -> None:
    with (
        own_redis() as server,
        running_worker(server.url, tmp_path, model_name="toy", max_sequences=2, lease_s=4),
        Client(server.url) as client,
        stock_app(server.url) as stock,
    ):
        job = begun(client.submit(prompt=latch.prompt(after=200), max_tokens=300, tenant="acme"))
        kwargs = {"prompt": latch.prompt(after=200), "max_tokens": 300}
        sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue="llorch.toy")
        begun(client.job(sent.id))
        seen: list[StreamEntry] = []
        stream = job.stream(timeout=GET_S)
        while not token_ids(seen):
            seen.append(next(stream))
        if restart:
            server.halt()
            server.start()
        else:
            client.redis.flushall()
        latch.open()
        assert sent.get(timeout=GET_S)["choices"][0]["token_ids"] == list(range(300))
        assert list(job.result(GET_S).choices[0].token_ids) == list(range(300))
        if not restart:
            assert token_ids([*seen, *stream]) == list(range(300))
        assert token_ids(job.stream(timeout=GET_S)) == list(range(300))
        wait_until(lambda: not held_ids(client.redis), what="the acknowledgement")


def test_a_job_that_waits_for_its_time_survives_a_reconnect(
    own_server: RedisServer, own_worker: WorkerProcess, own_client: Client
) -> None:
    with Celery("stock", broker=own_server.url, set_as_current=False) as stock:
        kwargs = {"prompt": "x", "max_tokens": 2}
        sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue="llorch.toy", countdown=3)
    wait_until(lambda: own_client.job(sent.id).status().state == "queued")
    own_server.halt()
    own_server.start()
    assert own_client.job(sent.id).result(GET_S).text == "w0 w1 "


def test_a_worker_that_celery_started_before_its_redis_serves_once_it_is_there(
    tmp_path: Path,
) -> None:
    server = RedisServer()
    worker = WorkerProcess(server.url, tmp_path / "early.log", model_name="toy")
    try:
        wait_until(lambda: "takes no jobs yet, will retry: No Redis at" in worker.text())
        server.start()
        wait_until(worker.card, what="the worker to announce itself")
        with Client(server.url) as client:
            assert client.submit(prompt="x", max_tokens=2).result(GET_S).text == "w0 w1 "
    finally:
        worker.stop()
        server.remove()
