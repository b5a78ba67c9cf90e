"""Celery's events are sent while somebody listens."""

from __future__ import annotations

import pytest
from celery import Celery

from llorch_worker.client import Client
from tests.monitor import Monitor
from tests.services import wait_until

pytestmark = pytest.mark.usefixtures("toy_worker")
GET_S = 60


def published(client: Client) -> int:
    """States of jobs and events alike."""
    return int(client.redis.info("commandstats")["cmdstat_publish"]["calls"])


def run_jobs(client: Client, jobs: int) -> list[str]:
    sent = [client.submit(prompt="x", max_tokens=1) for _ in range(jobs)]
    return [job.result(GET_S).id for job in sent]


def test_jobs_that_nobody_watches_send_no_events(client: Client) -> None:
    # Their events may tell that nobody listens.
    run_jobs(client, 2)
    wait_until(lambda: published(client) > 0)
    before = published(client)
    for _ in range(20):
        run_jobs(client, 1)
    # That each started, and its result; and perhaps some heartbeats.
    assert published(client) - before < 2 * 20 + 5


@pytest.mark.parametrize("time", ["first", "again"])
def test_who_begins_to_listen_hears_of_all_jobs_from_then_on(
    client: Client, stock: Celery, time: str
) -> None:
    run_jobs(client, 2)
    with Monitor(stock) as monitor:
        wait_until(lambda: any(event["type"] == "worker-heartbeat" for event in [*monitor.events]))
        ids = run_jobs(client, 3)
        kinds = ("task-received", "task-started", "task-succeeded")
        wait_until(lambda: all(monitor.saw(kind, job_id) for job_id in ids for kind in kinds))
