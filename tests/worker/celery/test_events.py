"""Who listens to Celery's events hears those of every job."""

from __future__ import annotations

import pytest
from celery import Celery

from llorch_worker.client import Client
from tests.monitor import Monitor
from tests.services import wait_until

pytestmark = pytest.mark.usefixtures("toy_worker")
GET_S = 60


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
