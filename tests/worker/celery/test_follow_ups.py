"""What follows a job, and names no queue, goes to the workers of the application that sent it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery, chain, chord

from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.services import (
    RedisServer,
    WorkerProcess,
    running_worker,
    stock_app,
    wait_until,
)
from tests.worker.celery.remote import consumed, told

GET_S = 60
QUEUE = "llorch.toy"
OTHER_APP = "tests.other_app"


@pytest.fixture
def shop(own_server: RedisServer, own_worker: WorkerProcess, tmp_path: Path) -> Iterator[Celery]:
    """A stock producer, beside our worker and a stock one."""
    options = ("--pool", "solo", "--without-gossip", "--without-mingle")
    url = own_server.url
    with (
        running_worker(url, tmp_path, app=OTHER_APP, name="shop", options=options),
        stock_app(url) as app,
    ):
        yield app


def test_a_chain_a_chord_and_an_errback_of_a_stock_producer_reach_its_own_worker(
    shop: Celery, own_server: RedisServer
) -> None:
    job = shop.signature(TASK_NAME, kwargs={"prompt": "x", "max_tokens": 2}, queue=QUEUE)
    text = shop.signature("other.text")
    assert chain(job, text, app=shop).apply_async().get(timeout=GET_S) == "w0 w1 "
    chorded = chord([job, job.clone()], text, app=shop).apply_async()
    assert chorded.get(timeout=GET_S) == ["w0 w1 ", "w0 w1 "]
    refused = shop.signature(TASK_NAME, kwargs={"prompt": ""}, queue=QUEUE)
    refused.link_error(shop.signature("other.failed", kwargs={"key": "told"}))
    refused_id = refused.apply_async().id
    with connect(own_server.url) as client:
        assert wait_until(lambda: client.get("told")) == refused_id


def test_a_worker_that_sent_a_follow_up_still_takes_only_jobs_after_a_reconnect(
    own_server: RedisServer, own_worker: WorkerProcess, own_client: Client
) -> None:
    with Celery("shop", broker=own_server.url, set_as_current=False) as stock:
        before = consumed(stock, own_worker)
        job = stock.signature(TASK_NAME, kwargs={"prompt": "x", "max_tokens": 2}, queue=QUEUE)
        chain(job, stock.signature("other.text"), app=stock).apply_async()
        wait_until(lambda: own_client.redis.llen("celery") == 1)
        own_server.halt()
        own_server.start()
        assert told(stock, own_worker, "active_queues")
        assert consumed(stock, own_worker) == before
        assert own_client.submit(prompt="x", max_tokens=2).result(GET_S).text == "w0 w1 "
        assert own_client.redis.llen("celery") == 1
