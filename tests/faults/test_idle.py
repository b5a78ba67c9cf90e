"""A worker sends Redis few commands, idle or for a job, and stays connected."""

from __future__ import annotations

import time

from llorch_worker.client import Client
from tests.faults.conftest import StartWorker
from tests.services import wait_until
from tests.store import ttls

MOST_COMMANDS_A_SECOND = 12
"""Just after a job. Once it has been idle for ten seconds it sends four: ``benches/fleet``."""
WINDOW_S = 4.0
MOST_COMMANDS_A_JOB = 48
"""Those inside scripts and the producer's included."""
JOBS = 50


def commands(client: Client) -> int:
    return int(client.redis.info("stats")["total_commands_processed"])


def test_an_idle_worker_sends_few_commands(client: Client, start_worker: StartWorker) -> None:
    start_worker(lease_s=10, sweep_s=5)
    client.submit(prompt="x", max_tokens=2).result(120)
    before, began_s = commands(client), time.monotonic()
    # A rate needs a window of time.
    time.sleep(WINDOW_S)
    sent, took_s = commands(client) - before, time.monotonic() - began_s
    assert sent / took_s < MOST_COMMANDS_A_SECOND


def test_a_job_costs_redis_few_commands(client: Client, start_worker: StartWorker) -> None:
    start_worker(lease_s=10, sweep_s=5)
    client.submit(prompt="x", max_tokens=1).result(120)
    calls = []
    for _ in range(JOBS):
        client.redis.config_resetstat()
        job = client.submit(prompt="x", max_tokens=1)
        # Only ended jobs expire; nothing else asks with TTL.
        wait_until(lambda job=job: ttls(client.redis, job.id)[1] > 0)
        stats = client.redis.info("commandstats")
        calls.append(sum(each["calls"] for name, each in stats.items() if name != "cmdstat_ttl"))
    # What the worker does besides, now and then, is in the others: in more on a busy machine.
    assert min(calls) < MOST_COMMANDS_A_JOB, calls


def test_an_idle_worker_keeps_its_connections(client: Client, start_worker: StartWorker) -> None:
    """Celery's mingle leaves a BRPOP whose reply this worker's consumer never reads."""
    worker = start_worker(app="tests.faults.impatient_app")
    client.submit(prompt="x", max_tokens=2).result(120)
    # Longer than the silence after which this Celery closes a connection.
    time.sleep(WINDOW_S)
    assert "stale connection" not in worker.text()
