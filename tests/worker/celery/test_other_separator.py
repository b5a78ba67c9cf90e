"""Stock apps with the broker options that Celery's documentation shows for priorities on Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.services import RedisServer, WorkerProcess, stock_app
from tests.worker.celery.remote import told

GET_S = 60
DOCUMENTED = {
    "priority_steps": list(range(10)), "sep": ":", "queue_order_strategy": "priority",
}  # fmt: skip


@pytest.fixture
def documented(redis_server: RedisServer) -> Iterator[Celery]:
    with stock_app(redis_server.url) as app:
        app.conf.broker_transport_options = DOCUMENTED
        yield app


def test_jobs_of_all_their_priorities_run(
    toy_worker: WorkerProcess, client: Client, documented: Celery
) -> None:
    sent = [
        documented.send_task(
            TASK_NAME, kwargs={"prompt": "x", "max_tokens": 1}, queue=queue, priority=priority
        )
        for queue in ("llorch.toy", "llorch.toy:high")
        for priority in range(10)
    ]
    for job in sent:
        assert job.get(timeout=GET_S)["text"] == "w0 "


def test_they_and_all_others_get_replies_to_inspect(
    toy_worker: WorkerProcess, stock: Celery, documented: Celery
) -> None:
    # Its binding stays in Redis while it is connected.
    for app in (documented, stock, documented):
        assert told(app, toy_worker, "ping") == {"ok": "pong"}
