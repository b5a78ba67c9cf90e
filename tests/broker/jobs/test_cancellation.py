"""Redis decides, in one step, whether a cancel or a claim came first."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import redis
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from llorch_worker.broker import keys
from llorch_worker.broker.jobs import claims, follow_ups
from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.broker.messages.message import TENANT
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.enqueue import LONGEST_WAIT_S
from llorch_worker.client import Client, Job
from llorch_worker.contract import Cancelled, CancelledEvent, InternalError
from tests.broker.steps import SETTINGS, TERMS, load, push, sweep, take, weigh
from tests.messages import QUEUE
from tests.store import (
    cancel_asked,
    follow_ups_in,
    leases_in,
    message_of,
    stored_result,
    ttls,
    waiting_ids,
)

DEAD_AT_ONCE = replace(TERMS, lease_ms=-1)


def outcome(client: Client, job: Job) -> str:
    return cancel(client.redis, job.id, SETTINGS)


def assert_cancelled(job: Job) -> None:
    with pytest.raises(Cancelled):
        job.result(timeout=0)
    (entry,) = job.stream(timeout=0.1)
    assert isinstance(entry.event, CancelledEvent)
    assert job.status().state == "cancelled"


def test_a_waiting_job_ends_at_once_and_is_never_claimed(producer: Client) -> None:
    job, other = producer.submit(prompt="x"), producer.submit(prompt="x")
    assert job.cancel()
    assert_cancelled(job)
    assert [claim.job_id for claim in take(producer.redis, limit=9)] == [other.id]
    assert not job.cancel(), "it has ended"


def test_an_unknown_id_is_not_cancelled_and_leaves_no_trace(producer: Client) -> None:
    before = sorted(producer.redis.keys())
    assert not producer.job("nobody sent this").cancel()
    assert sorted(producer.redis.keys()) == before
    assert producer.job("nobody sent this").status().state == "unknown"


def test_a_revoke_that_a_worker_hears_before_the_message_ends_the_job(producer: Client) -> None:
    push(producer.redis, "stock")
    heard = cancel(producer.redis, "stock", SETTINGS, heard_by="toy")
    assert heard == "queued"
    assert not take(producer.redis)
    assert_cancelled(producer.job("stock"))


def test_a_stream_that_refuses_the_last_event_expires_with_its_job(producer: Client) -> None:
    job = producer.submit(prompt="x")
    stream = keys.events(job.id)
    # The stream is empty, and takes only greater ids.
    producer.redis.xdel(stream, producer.redis.xadd(stream, {"event": "x"}, id="9-0"))
    assert job.cancel()
    assert producer.redis.ttl(stream) > 0
    assert_cancelled(job)


def test_a_stock_app_reads_the_cancelled_job(producer: Client, stock: Celery) -> None:
    job = producer.submit(prompt="x")
    result = AsyncResult(job.id, app=stock)
    job.cancel()
    assert result.state == "REVOKED"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=120)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_revoke_that_a_stock_worker_stored_ends_the_job_at_its_claim(
    producer: Client, stock: Celery, scheduled: bool
) -> None:
    job = revoked_elsewhere(producer, stock, scheduled)
    before = stored_result(producer.redis, job.id)
    producer.redis.zadd(keys.scheduled("toy"), {job.id: 0}, xx=True)
    inbox_watch.look(producer.redis, "toy", wakes_anyway=True)
    assert not take(producer.redis)
    assert_cancelled(job)
    assert stored_result(producer.redis, job.id) == before
    assert follow_ups_in(producer.redis).get(job.id) is not None


def test_a_cancel_after_a_revoke_that_a_stock_worker_stored_keeps_its_result(
    producer: Client, stock: Celery
) -> None:
    job = revoked_elsewhere(producer, stock, scheduled=True)
    before = stored_result(producer.redis, job.id)
    job.cancel()
    assert stored_result(producer.redis, job.id) == before
    assert_cancelled(job)
    assert not producer.redis.zcard(keys.scheduled("toy"))


def test_a_revoke_that_a_stock_worker_stored_after_the_claim_keeps_its_result(
    producer: Client, stock: Celery
) -> None:
    """Nobody told the worker that runs the job, so it ends it otherwise."""
    push(producer.redis, "revoked")
    (claim,) = take(producer.redis)
    stock.backend.mark_as_revoked("revoked", reason="revoked", store_result=True)
    before = stored_result(producer.redis, "revoked")
    assert claims.fail(producer.redis, claim, ValueError("x"), TERMS)
    assert stored_result(producer.redis, "revoked") == before
    assert not leases_in(producer.redis)


def revoked_elsewhere(producer: Client, stock: Celery, scheduled: bool) -> Job:
    """Celery's workers do this when they hear of a revoke."""
    eta = (datetime.now(UTC) + timedelta(hours=1)).isoformat() if scheduled else None
    push(producer.redis, "revoked", eta=eta)
    if scheduled:
        assert not take(producer.redis)
    stock.backend.mark_as_revoked("revoked", reason="revoked", store_result=True)
    return producer.job("revoked")


def test_waiters_are_told_of_a_cancel_at_once(producer: Client, stock: Celery) -> None:
    job = producer.submit(prompt="x")
    ends: list[BaseException] = []

    def wait(get: object) -> None:
        try:
            get()  # type: ignore[operator]
        except (Cancelled, TaskRevokedError) as error:
            ends.append(error)

    result = AsyncResult(job.id, app=stock)
    waiters = [
        threading.Thread(target=wait, args=(get,))
        for get in (lambda: job.result(60), lambda: result.get(timeout=60))
    ]
    for waiter in waiters:
        waiter.start()
    job.cancel()
    for waiter in waiters:
        waiter.join()
    assert {type(end) for end in ends} == {Cancelled, TaskRevokedError}


def test_a_claimed_job_is_left_to_its_worker(producer: Client) -> None:
    job = producer.submit(prompt="x")
    with producer.redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(keys.cancel_channel(0))
        pubsub.get_message(timeout=30)
        take(producer.redis)
        assert outcome(producer, job) == "running"
        message = pubsub.get_message(timeout=30)
    assert message is not None
    assert message["data"] == job.id
    assert cancel_asked(producer.redis, job.id)
    assert job.status().state == "cancelling"


def test_a_job_that_was_handed_back_ends_like_a_waiting_one(producer: Client) -> None:
    job = producer.submit(prompt="x")
    (claim,) = take(producer.redis)
    claims.hand_back(producer.redis, claim)
    assert job.status().state == "queued"
    assert outcome(producer, job) == "queued"
    assert_cancelled(job)
    assert take(producer.redis) == []
    assert load(producer.redis).waiting == 0


def test_a_swept_job_ends_like_a_waiting_one(producer: Client) -> None:
    job = producer.submit(prompt="x")
    take(producer.redis, DEAD_AT_ONCE)
    assert sweep(producer.redis) == [job.id]
    assert outcome(producer, job) == "queued"
    assert_cancelled(job)
    assert take(producer.redis) == []


def test_a_job_with_a_lapsed_lease_ends_at_once(producer: Client) -> None:
    job = producer.submit(prompt="x")
    (claim,) = take(producer.redis, DEAD_AT_ONCE)
    assert outcome(producer, job) == "queued"
    assert_cancelled(job)
    # The worker was only slow: it may write nothing more.
    assert claims.renew(producer.redis, [claim], lease_ms=60_000) == [claim]
    assert not claims.fail(producer.redis, claim, InternalError("late"), TERMS)
    assert not claims.hand_back(producer.redis, claim)
    assert sweep(producer.redis) == []
    assert_cancelled(job)


def test_a_cancelled_job_leaves_no_message(producer: Client) -> None:
    job = producer.submit(prompt="x")
    job.cancel()
    assert not message_of(producer.redis, job.id)
    assert not waiting_ids(producer.redis)
    assert 0 < ttls(producer.redis, job.id)[0] <= producer.settings.result_ttl_s


def test_a_job_that_was_cancelled_before_anybody_saw_it_is_remembered_until_its_message_comes(
    producer: Client,
) -> None:
    store = producer.redis
    heard = cancel(store, "stock", SETTINGS, heard_by="toy")
    assert heard == "queued"
    assert ttls(store, "stock")[0] > LONGEST_WAIT_S - 60
    push(store, "stock", "stock")
    assert not take(store)
    ((job_id, message, *_),) = follow_ups.take(store, 60)
    assert (job_id, "stock" in message) == ("stock", True)
    assert_cancelled(producer.job("stock"))


def test_concurrent_cancels_and_claims_leave_each_job_on_one_side(producer: Client) -> None:
    jobs = [producer.submit(prompt="x") for _ in range(200)]
    claimed: list[str] = []
    go = threading.Barrier(2)

    def claim_all() -> None:
        go.wait()
        while taken := take(producer.redis, limit=3):
            claimed.extend(claim.job_id for claim in taken)

    thread = threading.Thread(target=claim_all)
    thread.start()
    go.wait()
    # From the tail on: the two meet in the middle.
    outcomes = {job.id: outcome(producer, job) for job in reversed(jobs)}
    thread.join()
    cancelled = {job_id for job_id, found in outcomes.items() if found == "queued"}
    assert cancelled.isdisjoint(claimed)
    assert cancelled | set(claimed) == set(outcomes)


def test_a_revoke_moves_what_lies_in_the_inbox_by_its_tenants_weights_and_wakes_a_worker(
    store: redis.Redis,
) -> None:
    weigh(store, "three=3")
    for tenant in ("one", "three"):
        push(store, *(f"{tenant}{number}" for number in range(9)), **{TENANT: tenant})
    cancel(store, "absent", SETTINGS, heard_by="toy")
    assert store.llen(keys.wake(QUEUE)) == 1
    first = waiting_ids(store)[:8]
    assert sum(job_id.startswith("three") for job_id in first) == 6
