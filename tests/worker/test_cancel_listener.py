from __future__ import annotations

from collections.abc import Iterator

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.cancellation import cancel
from llorch_worker.broker.connection import connect
from llorch_worker.worker.active_jobs import ActiveJobs, CancelListener
from tests.broker.jobs import claim_on, push, take
from tests.services import RedisServer, wait_until
from tests.store import ask_cancel
from tests.worker.test_active_jobs import Generation


@pytest.fixture
def running() -> ActiveJobs:
    return ActiveJobs()


@pytest.fixture
def listener(own_server: RedisServer, running: ActiveJobs) -> Iterator[CancelListener]:
    with connect(own_server.url) as client:
        listener = CancelListener(client, running)
        listener.start()
        yield listener
        listener.close()


def start(running: ActiveJobs, job_id: str) -> Generation:
    job = running.enter(claim_on(job_id))
    generation = Generation()
    job.attach(generation)
    return generation


def subscribed(own_server: RedisServer) -> bool:
    with connect(own_server.url) as client:
        (_, count) = client.pubsub_numsub(keys.cancel_channel(0))[0]
        return bool(count)


def test_a_published_id_cancels_that_job_only(
    own_server: RedisServer, running: ActiveJobs, listener: CancelListener
) -> None:
    mine, other = start(running, "mine"), start(running, "other")
    wait_until(lambda: subscribed(own_server))
    with connect(own_server.url) as client:
        client.publish(keys.cancel_channel(0), "mine")
    wait_until(mine.cancelled.is_set)
    assert not other.cancelled.is_set()


def test_a_cancel_in_another_database_of_the_same_redis_is_not_heard(
    own_server: RedisServer, running: ActiveJobs, listener: CancelListener
) -> None:
    same, later = start(running, "same"), start(running, "later")
    wait_until(lambda: subscribed(own_server))
    with connect(own_server.url) as here, connect(own_server.in_database(1)) as there:
        for client, job_id in ((there, "same"), (here, "later")):
            push(client, job_id)
            take(client)
            assert cancel(client, job_id, result_ttl_s=60, stream_ttl_s=60) == "running"
    # One subscription hears in the order of the calls.
    wait_until(later.cancelled.is_set)
    assert not same.cancelled.is_set()


def test_a_cancel_that_was_published_while_redis_was_lost_takes_effect_after_it_is_back(
    own_server: RedisServer, running: ActiveJobs, listener: CancelListener
) -> None:
    generation = start(running, "job")
    wait_until(lambda: subscribed(own_server))
    with connect(own_server.url) as client:
        # The key is kept by the own_server; the message on the channel is heard by nobody.
        ask_cancel(client, "job")
    own_server.halt()
    own_server.start()
    wait_until(generation.cancelled.is_set)
