from __future__ import annotations

from collections.abc import Iterator

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect
from llorch_worker.worker.active_jobs import ActiveJobs
from llorch_worker.worker.cancellation import CancelListener
from tests.services import RedisServer, own_redis, wait_until


class Generation:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with own_redis(append_only=True) as server:
        yield server


@pytest.fixture
def running() -> ActiveJobs:
    return ActiveJobs()


@pytest.fixture
def listener(server: RedisServer, running: ActiveJobs) -> Iterator[CancelListener]:
    with connect(server.url) as client:
        listener = CancelListener(client, running)
        listener.start()
        yield listener
        listener.close()


def start(running: ActiveJobs, job_id: str) -> Generation:
    job, new = running.enter(job_id)
    assert new
    generation = Generation()
    job.attach(generation)
    return generation


def subscribed(server: RedisServer) -> bool:
    with connect(server.url) as client:
        (_, count) = client.pubsub_numsub(keys.CANCEL_CHANNEL)[0]
        return bool(count)


def test_a_published_id_cancels_that_job_only(
    server: RedisServer, running: ActiveJobs, listener: CancelListener
) -> None:
    mine, other = start(running, "mine"), start(running, "other")
    wait_until(lambda: subscribed(server))
    with connect(server.url) as client:
        client.publish(keys.CANCEL_CHANNEL, "mine")
    wait_until(lambda: mine.cancelled)
    assert not other.cancelled


def test_a_cancel_that_was_published_while_redis_was_lost_takes_effect_after_it_is_back(
    server: RedisServer, running: ActiveJobs, listener: CancelListener
) -> None:
    generation = start(running, "job")
    wait_until(lambda: subscribed(server))
    with connect(server.url) as client:
        # The key is kept by the server; the message on the channel is heard by nobody.
        client.set(keys.cancel("job"), 1)
    server.halt()
    server.start()
    wait_until(lambda: generation.cancelled)
    assert listener.is_cancelled("job")


def test_a_cancel_before_the_generation_exists_is_kept(running: ActiveJobs) -> None:
    job, _ = running.enter("job")
    running.cancel("job")
    generation = Generation()
    job.attach(generation)
    assert generation.cancelled


def test_a_cancelled_job_is_not_handed_back_and_a_handed_back_one_stays_so(
    running: ActiveJobs,
) -> None:
    cancelled, _ = running.enter("cancelled")
    running.cancel("cancelled")
    running.hand_back("cancelled")
    assert not cancelled.handed_back
    returned, _ = running.enter("returned")
    running.hand_back("returned")
    running.cancel("returned")
    assert returned.handed_back


def test_the_same_job_twice_is_one_job(running: ActiveJobs) -> None:
    first, new = running.enter("job")
    again, new_again = running.enter("job")
    assert (new, new_again) == (True, False)
    assert again is first
    running.leave(first)
    assert running.ids() == []
