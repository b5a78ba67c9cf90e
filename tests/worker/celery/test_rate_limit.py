"""Celery's rate limits: a worker claims no job that its limit does not let start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from llorch_worker.client import Client, Job
from llorch_worker.contract import TASK_NAME
from tests.services import RedisServer, WorkerProcess, begun, running_worker, wait_until
from tests.store import held_ids
from tests.worker.celery.remote import told

GET_S = 60
ONE_AN_HOUR = "1/h"


@pytest.fixture
def stock_app(own_server: RedisServer) -> Iterator[Celery]:
    with Celery("stock", broker=own_server.url, set_as_current=False) as app:
        yield app


def limit(stock: Celery, worker: WorkerProcess, rate: str | int | None) -> None:
    reply = told(stock, worker, "rate_limit", task_name=TASK_NAME, rate_limit=rate)
    assert list(reply) == ["ok"]


def limited(client: Client, stock: Celery, worker: WorkerProcess) -> tuple[Job, list[Job]]:
    """The job that a limit of one an hour lets run, and three that it makes wait."""
    limit(stock, worker, ONE_AN_HOUR)
    first, *waiting = (client.submit(prompt="x", max_tokens=2) for _ in range(4))
    assert first.result(GET_S).text == "w0 w1 "
    return first, waiting


def test_jobs_beyond_the_limit_wait_in_redis_and_run_at_once_when_it_is_lifted(
    own_client: Client, own_worker: WorkerProcess, stock_app: Celery
) -> None:
    for lifted in (0, None, "100/s"):
        _, waiting = limited(own_client, stock_app, own_worker)
        assert {job.status().state for job in waiting} == {"queued"}
        assert not held_ids(own_client.redis)
        assert told(stock_app, own_worker, "reserved") == []
        limit(stock_app, own_worker, lifted)
        for job in waiting:
            assert job.result(GET_S).attempts == 1


def test_another_worker_takes_the_jobs_beyond_the_limit(
    own_server: RedisServer,
    own_client: Client,
    own_worker: WorkerProcess,
    stock_app: Celery,
    tmp_path: Path,
) -> None:
    first, waiting = limited(own_client, stock_app, own_worker)
    with running_worker(own_server.url, tmp_path, name="w2", model_name="toy"):
        assert {job.result(GET_S).worker for job in waiting} == {"w2@test"}
    assert first.result().worker == own_worker.hostname


def test_a_limit_outlives_a_restart_of_redis_and_can_be_lifted_after_it(
    own_server: RedisServer, own_client: Client, own_worker: WorkerProcess, stock_app: Celery
) -> None:
    _, waiting = limited(own_client, stock_app, own_worker)
    own_server.halt()
    own_server.start()
    # It replies, so its loop runs again.
    assert told(stock_app, own_worker, "reserved") == []
    assert {job.status().state for job in waiting} == {"queued"}
    limit(stock_app, own_worker, 0)
    for job in waiting:
        assert job.result(GET_S).attempts == 1


def test_jobs_start_no_faster_than_the_limit_and_no_job_is_forgotten(
    own_client: Client, own_worker: WorkerProcess, stock_app: Celery
) -> None:
    per_s = 20
    limit(stock_app, own_worker, f"{per_s}/s")
    began_s = time.monotonic()
    jobs = [own_client.submit(prompt="x", max_tokens=1) for _ in range(12)]
    for job in jobs:
        job.result(GET_S)
    # The bucket holds one token.
    assert time.monotonic() - began_s >= (len(jobs) - 1) / per_s


def test_a_limit_is_set_while_jobs_run_and_counts_from_the_next(
    own_client: Client, own_worker: WorkerProcess, stock_app: Celery
) -> None:
    running = begun(own_client.submit(prompt="x", max_tokens=4000))
    limit(stock_app, own_worker, ONE_AN_HOUR)
    beside = own_client.submit(prompt="x", max_tokens=2)
    assert beside.result(GET_S).text == "w0 w1 "
    third = own_client.submit(prompt="x", max_tokens=2)
    running.cancel()
    wait_until(lambda: not held_ids(own_client.redis))
    assert told(stock_app, own_worker, "reserved") == []
    assert third.status().state == "queued"


def test_jobs_that_arrive_together_with_a_limit_wait_in_redis(
    own_client: Client, own_worker: WorkerProcess, stock_app: Celery
) -> None:
    for _ in range(3):
        with own_worker.paused():
            jobs = [own_client.submit(prompt="x", max_tokens=2) for _ in range(4)]
            options = {"task_name": TASK_NAME, "rate_limit": ONE_AN_HOUR}
            stock_app.control.broadcast("rate_limit", options, [own_worker.hostname])
        assert jobs[0].result(GET_S).text == "w0 w1 "
        wait_until(lambda: not held_ids(own_client.redis), what="no job in the worker's hands")
        assert told(stock_app, own_worker, "reserved") == []
        limit(stock_app, own_worker, 0)
        for job in jobs:
            assert job.result(GET_S).attempts == 1


@pytest.mark.parametrize("rate", ["-1/m", -3, "inf/s", "nan", "6/y", "often", [6]])
def test_a_rate_that_is_none_is_refused(
    stock: Celery, toy_worker: WorkerProcess, client: Client, rate: object
) -> None:
    reply = told(stock, toy_worker, "rate_limit", task_name=TASK_NAME, rate_limit=rate)
    assert reply == {"error": "a rate limit is a number of jobs, as in 5/s, 5/m or 5/h; 0 lifts it"}
    assert client.submit(prompt="x", max_tokens=2).result(GET_S).text == "w0 w1 "
