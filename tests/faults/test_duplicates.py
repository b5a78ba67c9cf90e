"""A message that is delivered twice: its job still runs once."""

from __future__ import annotations

from llorch_worker.broker import queues
from llorch_worker.client import Client, Job
from tests.faults.conftest import StartWorker
from tests.faults.witness import Witness
from tests.latch import Latch
from tests.services import wait_until
from tests.store import held_ids, message_of


def copy_of(client: Client, job: Job) -> str:
    """The message of a job that is queued or running."""
    return message_of(client.redis, job.id)


def deliver_again(client: Client, message: str) -> None:
    client.redis.lpush(queues.normal_queue("toy"), message)


def test_a_message_that_is_queued_twice_runs_once(
    start_worker: StartWorker, witness: Witness, client: Client
) -> None:
    job = witness.send(50)
    deliver_again(client, copy_of(client, job))
    start_worker("w1", max_sequences=1)
    start_worker("w2")
    last = witness.send(5)
    witness.assert_whole(job, last)
    assert len(witness.runs(job)) == 1
    assert job.result(0).attempts == 1


def test_a_message_delivered_again_during_or_after_its_job_is_ignored(
    start_worker: StartWorker, witness: Witness, client: Client, latch: Latch
) -> None:
    start_worker("w1")
    start_worker("w2")
    job = witness.begun(witness.send(200, latch.prompt(after=199)))
    message = copy_of(client, job)
    for _ in range(4):
        deliver_again(client, message)
    wait_until(lambda: not client.redis.llen(queues.normal_queue("toy")))
    latch.open()
    witness.assert_whole(job)
    wait_until(lambda: not held_ids(client.redis))
    for _ in range(4):
        deliver_again(client, message)
    witness.assert_whole(job, witness.send(5))
    wait_until(lambda: not client.redis.llen(queues.normal_queue("toy")))
    witness.assert_whole(job)
    assert len(witness.runs(job)) == 1
    assert witness.record(job)["duplicates"] == "8"
    assert job.result(0).attempts == 1


def test_a_message_delivered_again_after_a_crash_is_ignored_too(
    start_worker: StartWorker, witness: Witness, client: Client, latch: Latch
) -> None:
    first = start_worker("w1")
    job = witness.begun(witness.send(300, latch.prompt(after=299)), 20)
    message = copy_of(client, job)
    first.process.kill()
    first.process.wait()
    latch.open()
    deliver_again(client, message)
    start_worker("w2")
    witness.assert_whole(job)
    assert witness.runs(job) == ["w1@test", "w2@test"]
    assert job.result(0).attempts == 2
