"""The tasks that every Celery app has. A stock producer's canvas, or beat, may send them here."""

from __future__ import annotations

import pytest
from celery import Celery

from tests.services import WorkerProcess

QUEUE = "llorch.toy"
GET_S = 30


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [
        ("celery.accumulate", ["a", ["b"], None], ["a", ["b"], None]),
        ("celery.backend_cleanup", [], None),
    ],
)
def test_a_task_of_celery_s_own_ends_with_its_result(
    toy_worker: WorkerProcess, stock: Celery, name: str, args: list[object], result: object
) -> None:
    assert stock.send_task(name, args=args, queue=QUEUE).get(GET_S) == result
