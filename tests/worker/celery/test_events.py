"""Who listens to Celery's events hears those of every job."""

from __future__ import annotations

import json

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.monitor import Monitor
from tests.services import wait_until
from tests.store import follow_ups_in

pytestmark = pytest.mark.usefixtures("toy_worker")
GET_S = 60


NO_TASKS: dict[str, tuple[str, object]] = {
    "torn": (TASK_NAME, b"{"),
    "of no task": ("llorch.generat", GOOD_BODY),
    "beside it a list": (TASK_NAME, [[], {}, [1]]),
    "beside it a text": (TASK_NAME, [[], {}, "x"]),
}


def test_a_message_that_becomes_no_task_fails_in_one_event(client: Client, stock: Celery) -> None:
    with Monitor(stock, "task.#") as monitor:
        for job_id, (task, body) in NO_TASKS.items():
            message = envelope(body, headers={"id": job_id, "task": task})
            client.redis.lpush(QUEUE, json.dumps(message))
        for job_id in NO_TASKS:
            wait_until(lambda job_id=job_id: monitor.saw("task-failed", job_id))
        wait_until(lambda: not follow_ups_in(client.redis))
        failed = [e["uuid"] for e in monitor.events if e["type"] == "task-failed"]
        assert sorted(failed) == sorted(NO_TASKS)


@pytest.mark.parametrize("routing_key", ["#", "task.#"])
def test_who_begins_to_listen_hears_of_all_jobs_from_then_on(
    client: Client, stock: Celery, routing_key: str
) -> None:
    for _ in range(2):
        client.submit(prompt="nobody hears of it", max_tokens=1).result(GET_S)
    with Monitor(stock, routing_key) as monitor:
        ids = [client.submit(prompt="x", max_tokens=1).result(GET_S).id for _ in range(3)]
        kinds = ("task-received", "task-started", "task-succeeded")
        wait_until(lambda: all(monitor.saw(kind, job_id) for job_id in ids for kind in kinds))
