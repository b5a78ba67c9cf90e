"""A job that waits ends at its deadline, whoever lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.jobs.deadlines import end_overdue
from llorch_worker.broker.queues import normal_queue
from llorch_worker.client import Client, Job
from llorch_worker.contract import TASK_NAME, DeadlineExceeded, Failed
from tests.gateways import running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, running_worker, stock_app
from tests.store import held_ids
from tests.telemetry.exporters import running_exporter
from tests.waiting import wait_until

SOON_S = 0.3


@pytest.fixture
def full_worker(own_server: RedisServer, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker that runs one job at a time."""
    with running_worker(
        own_server.url, tmp_path, model_name="toy", max_sequences=1, TOY_STEP_MS=5
    ) as worker:
        yield worker


@contextmanager
def a_gateway(url: str, folder: Path) -> Iterator[object]:
    with running_gateway(url, folder) as gateway:
        yield gateway


def assert_overdue(job: Job) -> None:
    with pytest.raises(DeadlineExceeded):
        job.result(timeout=120)
    assert job.status().state == "failed"
    assert [type(entry.event) for entry in job.stream()] == [Failed]


def test_a_full_worker_ends_jobs_that_wait_for_room(
    full_worker: WorkerProcess, own_client: Client, latch: Latch
) -> None:
    running = own_client.submit(prompt=latch.prompt(), max_tokens=5)
    wait_until(lambda: held_ids(own_client.redis))
    assert_overdue(own_client.submit(prompt="x", deadline_s=SOON_S))
    latch.open()
    assert len(running.result(60).choices[0].token_ids) == 5


@pytest.mark.parametrize("lives", [a_gateway, running_exporter])
def test_without_a_worker_others_end_it_and_no_later_worker_runs_it(
    lives: type[AbstractContextManager[object]],
    own_server: RedisServer,
    own_worker: WorkerProcess,
    own_client: Client,
    latch: Latch,
    tmp_path: Path,
) -> None:
    own_worker.stop()
    overdue = own_client.submit(prompt=latch.prompt(), deadline_s=SOON_S)
    own_client.submit(prompt="x", max_tokens=2, deadline_s=3600)
    with lives(own_server.url, tmp_path):
        assert_overdue(overdue)
    latch.open()
    with running_worker(own_server.url, tmp_path, name="later", model_name="toy"):
        assert own_client.submit(prompt="x", max_tokens=2).result(60)
    assert latch.ended() == 0


@pytest.mark.parametrize("redis_loses_it", [False, True])
def test_a_worker_that_dies_leaves_the_deadline_of_a_job_whose_enqueue_noted_none(
    redis_loses_it: bool,
    own_server: RedisServer,
    own_worker: WorkerProcess,
    own_client: Client,
    latch: Latch,
) -> None:
    redis = own_client.redis
    kwargs = {"prompt": latch.prompt(after=2), "deadline_s": 3600}
    if redis_loses_it:
        job = own_client.submit(**kwargs)
        wait_until(lambda: held_ids(redis))
        redis.flushall()
        wait_until(lambda: held_ids(redis))
    else:
        with stock_app(own_server.url) as stock:
            queue = normal_queue("toy")
            job = own_client.job(stock.send_task(TASK_NAME, kwargs=kwargs, queue=queue).id)
    wait_until(lambda: redis.zscore(keys.DEADLINES, job.id))
    own_worker.process.kill()
    redis.zadd(keys.LEASES, {job.id: 0})
    # As if an hour had passed.
    redis.zadd(keys.DEADLINES, {job.id: redis.zscore(keys.DEADLINES, job.id) - 3600e3})
    end_overdue(redis, own_client.settings)
    with pytest.raises(DeadlineExceeded):
        job.result(timeout=120)


def test_a_job_that_runs_is_its_workers(
    own_worker: WorkerProcess, own_client: Client, latch: Latch
) -> None:
    job = own_client.submit(prompt=latch.prompt(after=2), max_tokens=10, deadline_s=3600)
    wait_until(lambda: held_ids(own_client.redis))
    # As if Redis' clock were past the deadline already.
    own_client.redis.zadd(keys.DEADLINES, {job.id: time.time() * 1e3 - 1})
    end_overdue(own_client.redis, own_client.settings)
    latch.open()
    assert job.result(60).choices[0].finish_reason == "length"


def test_the_caller_of_a_gateway_gets_504(
    own_server: RedisServer, full_worker: WorkerProcess, tmp_path: Path
) -> None:
    body = {"model": "toy", "prompt": "x", "deadline_s": SOON_S}
    with running_gateway(own_server.url, tmp_path) as gateway, full_worker.paused():
        answers = [
            httpx.post(f"{gateway.url}/v1/completions", json=body | more, timeout=30)
            for more in ({}, {"stream": True})
        ]
    assert [answer.status_code for answer in answers] == [504, 504]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("completions", {"prompt": "x"}),
        ("responses", {"input": "x"}),
        ("responses", {"input": "x", "stream": True}),
    ],
)
def test_the_caller_gets_504_also_if_redis_goes(
    own_server: RedisServer,
    full_worker: WorkerProcess,
    own_client: Client,
    tmp_path: Path,
    path: str,
    more: dict[str, Any],
) -> None:
    with running_gateway(own_server.url, tmp_path) as gateway, full_worker.paused():
        url = f"{gateway.url}/v1/{path}"
        body = {"model": "toy", "deadline_s": 1, "idempotency_key": "a", **more}
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(url, json=body, timeout=30))
        )
        asking.start()
        wait_until(lambda: own_client.redis.exists(keys.DEADLINES))
        with own_server.paused():
            asking.join()
    assert answers[0].status_code == 504
