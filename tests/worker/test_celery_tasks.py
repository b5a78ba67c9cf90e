"""The tasks that every Celery app has. A stock producer's canvas, or beat, may send them here."""

from __future__ import annotations

import pytest
from celery import Celery

from llorch_worker.client import Client
from tests.services import WorkerProcess, wait_until
from tests.store import ttls

QUEUE = "llorch.toy"
GET_S = 60


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [
        ("celery.accumulate", ["a", ["b"], None], ["a", ["b"], None]),
        ("celery.backend_cleanup", [], None),
    ],
)
def test_a_task_of_celery_s_own_ends_with_its_result(
    toy_worker: WorkerProcess,
    stock: Celery,
    client: Client,
    name: str,
    args: list[object],
    result: object,
) -> None:
    sent = stock.send_task(name, args=args, queue=QUEUE)
    assert sent.get(GET_S) == result
    wait_until(lambda: ttls(client.redis, sent.id)[1] > 0, what="the result to expire")
