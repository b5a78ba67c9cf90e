"""Which jobs are here, and what becomes of a cancel that comes early."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.worker.active_jobs import ActiveJob, ActiveJobs, CancelListener
from tests.broker.steps import SETTINGS, claim_on, push, take
from tests.services import RedisServer, wait_until
from tests.store import ask_cancel


class Generation:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.mark.parametrize("hand_back", [False, True])
def test_a_stop_between_accept_and_entry_is_kept(hand_back: bool) -> None:
    jobs = ActiveJobs()
    jobs.expect("a")
    (jobs.hand_back if hand_back else jobs.cancel)("a")
    job = jobs.enter(claim_on("a"))
    assert (job.stopped, job.handed_back) == (True, hand_back)
    generation = Generation()
    job.attach(generation)
    assert generation.cancelled.is_set()


def entering(jobs: ActiveJobs, job_id: str, fence: int) -> tuple[threading.Thread, list[ActiveJob]]:
    entered: list[ActiveJob] = []
    thread = threading.Thread(target=lambda: entered.append(jobs.enter(claim_on(job_id, fence))))
    thread.start()
    return thread, entered


def test_a_second_delivery_stops_the_first_and_runs_once_it_has_left() -> None:
    jobs = ActiveJobs()
    first = jobs.enter(claim_on("a", fence=1))
    generation = Generation()
    first.attach(generation)
    jobs.expect("a")
    thread, second = entering(jobs, "a", fence=2)
    assert generation.cancelled.wait(10)
    assert first.handed_back
    assert not second, "it waits"
    jobs.leave(first)
    thread.join(10)
    assert not second[0].stopped
    jobs.leave(second[0])
    assert jobs.ids() == []


def test_a_delivery_that_a_newer_one_overtook_is_handed_back_at_once() -> None:
    jobs = ActiveJobs()
    newer = jobs.enter(claim_on("a", fence=2))
    assert jobs.enter(claim_on("a", fence=1)).handed_back
    assert not newer.stopped


def test_a_lost_claim_stops_its_own_run_only() -> None:
    jobs = ActiveJobs()
    lost, held = claim_on("a", fence=1), claim_on("a", fence=2)
    newer = jobs.enter(held)
    jobs.lose(lost)
    assert not newer.stopped
    jobs.lose(held)
    assert newer.handed_back


def test_a_cancel_reaches_every_delivery() -> None:
    jobs = ActiveJobs()
    newer = jobs.enter(claim_on("a", fence=2))
    jobs.expect("a")
    jobs.cancel("a")
    assert newer.stopped
    assert jobs.enter(claim_on("a", fence=1)).stopped


def test_a_job_that_never_entered_is_forgotten_and_one_that_did_is_not() -> None:
    jobs = ActiveJobs()
    jobs.expect("never")
    jobs.expect("here")
    jobs.enter(claim_on("here"))
    jobs.forget("never")
    jobs.forget("here")
    assert jobs.ids() == ["here"]


def test_a_cancel_of_a_job_that_is_elsewhere_does_nothing() -> None:
    jobs = ActiveJobs()
    jobs.cancel("elsewhere")
    assert not jobs.enter(claim_on("elsewhere")).stopped


def test_the_first_of_a_cancel_and_a_hand_back_wins() -> None:
    jobs = ActiveJobs()
    cancelled = jobs.enter(claim_on("cancelled"))
    jobs.cancel("cancelled")
    jobs.hand_back("cancelled")
    assert not cancelled.handed_back
    returned = jobs.enter(claim_on("returned"))
    jobs.hand_back("returned")
    jobs.cancel("returned")
    assert returned.handed_back


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
            assert cancel(client, job_id, SETTINGS) == "running"
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
