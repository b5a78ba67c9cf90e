"""Jobs that wait for their ETA cost the others nothing, whoever dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from celery.result import AsyncResult

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.faults.conftest import StartWorker
from tests.services import stock_app, wait_until
from tests.store import held_ids, letters_in

GET_S = 60
AN_HOUR_S = 3600


@pytest.fixture
def stock(client: Client) -> Iterator[Celery]:
    with stock_app(client.settings.redis_url) as app:
        yield app


def count_down(stock: Celery, countdown_s: float, tokens: int = 2) -> AsyncResult:
    kwargs = {"prompt": "x", "max_tokens": tokens}
    return stock.send_task(TASK_NAME, kwargs=kwargs, queue="llorch.toy", countdown=countdown_s)


def test_countdowns_neither_hold_a_slot_nor_suffer_from_deaths(
    client: Client, stock: Celery, start_worker: StartWorker
) -> None:
    later = [count_down(stock, AN_HOUR_S) for _ in range(100)]
    first, second = start_worker("w1"), start_worker("w2")
    wait_until(lambda: client.redis.zcard(keys.scheduled("toy")) == len(later))
    assert not held_ids(client.redis)
    running = [client.submit(prompt="x", max_tokens=300) for _ in range(8)]
    wait_until(lambda: all(job.status().state == "running" for job in running))
    first.process.kill()
    new = [client.submit(prompt="x", max_tokens=2) for _ in range(10)]
    for job in (*running, *new):
        job.result(GET_S)
    second.process.kill()
    third = start_worker("w3")
    # Two workers that knew of them have died.
    assert {job.state for job in later} == {"PENDING"}
    assert client.job(later[0].id).cancel()
    assert later[0].state == "REVOKED"
    client.redis.zadd(keys.scheduled("toy"), {later[1].id: 0})
    assert client.job(later[1].id).result(GET_S).attempts == 1
    assert "dead letter" not in third.text()
    assert not letters_in(client.redis)


def test_a_countdown_job_begins_when_it_is_due_in_an_idle_worker(
    client: Client, stock: Celery, start_worker: StartWorker
) -> None:
    start_worker()
    soon = [count_down(stock, seconds) for seconds in (0.2, 0.5, 1.7)]
    for result in soon:
        assert client.job(result.id).result(GET_S).attempts == 1
