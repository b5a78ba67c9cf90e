"""A running job obeys every kind of cancel within one step, and its neighbour goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from llorch_worker.broker.jobs import claims, usage
from llorch_worker.broker.jobs.results import REVOKED, decode_state
from llorch_worker.client import Client, Job
from llorch_worker.contract import Cancelled, CancelledEvent, Started, Tokens
from tests.broker.steps import take
from tests.services import RedisServer, WorkerProcess, begun, running_worker, wait_until
from tests.store import held_ids, stored_result

GET_S = 60
LONG = 4000


def start(client: Client, max_tokens: int = LONG) -> Job:
    return begun(client.submit(prompt="x", max_tokens=max_tokens))


def assert_cancelled(client: Client, job: Job) -> None:
    with pytest.raises(Cancelled):
        job.result(GET_S)
    assert decode_state(stored_result(client.redis, job.id)).status == REVOKED
    events = [entry.event for entry in job.stream(timeout=GET_S)]
    assert isinstance(events[-1], CancelledEvent)
    assert sum(isinstance(event, CancelledEvent) for event in events) == 1
    assert job.status().state == "cancelled"
    wait_until(lambda: not held_ids(client.redis), what="the message to be acknowledged")


def test_a_client_cancels_a_running_job(toy_worker: WorkerProcess, client: Client) -> None:
    job = start(client)
    assert job.cancel()
    assert_cancelled(client, job)
    assert not job.cancel(), "it has ended"


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL", "SIGUSR1"])
def test_whatever_the_signal_it_is_a_cancel(
    toy_worker: WorkerProcess, client: Client, stock: Celery, signal: str
) -> None:
    job = start(client)
    stock.control.terminate(job.id, signal=signal)
    assert_cancelled(client, job)
    assert toy_worker.process.poll() is None


@pytest.mark.parametrize("revoked", [False, True])
def test_a_queued_job_that_was_cancelled_or_revoked_never_runs(
    toy_worker: WorkerProcess, client: Client, stock: Celery, revoked: bool
) -> None:
    busy = [start(client) for _ in range(4)]
    queued = client.submit(prompt="x", max_tokens=LONG)
    assert queued.status().state == "queued"
    if revoked:
        stock.control.revoke(queued.id)
    else:
        assert queued.cancel()
        assert queued.status().state == "cancelled"
    assert_no_start(client, queued)
    assert not queued.cancel(), "it has ended"
    busy[0].cancel()
    assert_no_start(client, queued)
    for job in busy[1:]:
        job.cancel()
    for job in (*busy, queued):
        assert_cancelled(client, job)


@pytest.mark.parametrize("terminates", [False, True])
def test_a_job_that_was_handed_back_can_be_revoked_while_it_waits(
    toy_worker: WorkerProcess, client: Client, stock: Celery, terminates: bool
) -> None:
    """Its state is STARTED, which Celery leaves to the worker that stored it."""
    busy = [start(client) for _ in range(4)]
    queued = client.submit(prompt="x", max_tokens=LONG)
    (claim,) = take(client.redis, limit=1)
    assert claim.job_id == queued.id
    assert claims.hand_back(client.redis, claim)
    stock.control.revoke(queued.id, terminate=terminates)
    assert_no_start(client, queued)
    for job in busy:
        job.cancel()
    for job in (*busy, queued):
        assert_cancelled(client, job)


def assert_no_start(client: Client, job: Job) -> None:
    with pytest.raises(Cancelled):
        job.result(GET_S)
    events = [entry.event for entry in job.stream(timeout=GET_S)]
    assert not any(isinstance(event, Started) for event in events)


def test_a_job_that_had_finished_stays_finished(
    toy_worker: WorkerProcess, client: Client, stock: Celery
) -> None:
    job = client.submit(prompt="x", max_tokens=3)
    job.result(GET_S)
    assert not job.cancel()
    stock.control.revoke(job.id, terminate=True, reply=True, limit=1, timeout=GET_S)
    assert job.result(GET_S).text == "w0 w1 w2 "
    assert job.status().state == "succeeded"


def test_many_cancels_at_the_moment_of_finishing_leave_one_end_each(
    toy_worker: WorkerProcess, client: Client
) -> None:
    jobs = [client.submit(prompt="x", max_tokens=4) for _ in range(40)]
    for job in jobs:
        job.cancel()
    ends = []
    for job in jobs:
        try:
            job.result(GET_S)
            ends.append("succeeded")
        except Cancelled:
            ends.append("cancelled")
        terminal = [
            entry.event
            for entry in job.stream(timeout=GET_S)
            if entry.event.type in ("finished", "failed", "cancelled")
        ]
        assert len(terminal) == 1
        assert {"finished": "succeeded"}.get(terminal[0].type, terminal[0].type) == ends[-1]
        assert job.status().state == ends[-1]


def test_a_job_cancelled_after_its_worker_died_counts_with_its_tokens_so_far(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model_name": "toy", "lease_s": 2, "sweep_s": 1, "TOY_STEP_MS": 5}
    with running_worker(own_server.url, tmp_path, **settings) as worker:
        job = start(own_client)
        worker.process.kill()
    assert job.cancel()
    with running_worker(own_server.url, tmp_path, name="w2", **settings):
        assert_cancelled(own_client, job)
    tokens = [entry.event for entry in job.stream() if isinstance(entry.event, Tokens)]
    (row,) = usage.read(own_client.redis, usage.today(), usage.today())
    assert row.completion_tokens == sum(len(event.ids) for event in tokens) > 0
