"""A job with a later ETA waits in Redis, in nobody's way."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.waiting import waiting
from llorch_worker.client import Client
from tests.broker.steps import SETTINGS, announce, dying_after, load, look, push, sweep, take
from tests.messages import QUEUE, envelope
from tests.store import set_leases, stored_result

SCHEDULED = keys.scheduled("toy")


def in_s(seconds: float, zone: timezone = UTC) -> str:
    return (datetime.now(zone) + timedelta(seconds=seconds)).isoformat()


def let_come_due(store: redis.Redis, *job_ids: str) -> None:
    for number, job_id in enumerate(job_ids):
        store.zadd(SCHEDULED, {job_id: number})
    inbox_watch.look(store, "toy", wakes_anyway=True)


def test_a_job_with_a_later_eta_is_not_claimed_and_not_lost(
    store: redis.Redis, producer: Client
) -> None:
    push(store, "later", eta=in_s(3600))
    push(store, "now")
    assert [claim.job_id for claim in take(store)] == ["now"]
    assert look(store).look_again_s != 0
    found = load(store)
    assert (found.waiting, found.scheduled) == (0, 1)
    assert producer.job("later").status().state == "queued"
    assert stored_result(store, "later") is None


def test_a_job_is_not_reported_to_have_started_before_its_eta(store: redis.Redis) -> None:
    with store.pubsub() as reader:
        reader.psubscribe("celery-task-meta-*")
        push(store, "later", eta=in_s(3600))
        assert take(store) == []
        let_come_due(store, "later")
        assert reader.get_message(timeout=1)["type"] == "psubscribe"
        assert reader.get_message(timeout=0.1) is None
        assert len(take(store)) == 1
        assert json.loads(reader.get_message(timeout=10)["data"])["status"] == "STARTED"


def test_due_jobs_come_before_those_that_came_later(store: redis.Redis) -> None:
    push(store, "b", eta=in_s(3600))
    push(store, "a", eta=in_s(3600))
    assert take(store) == []
    push(store, "c")
    let_come_due(store, "a", "b")
    taken = take(store)
    assert [claim.job_id for claim in taken] == ["b", "a", "c"]
    # Its first attempt; the eta is still in the message.
    assert [(claim.attempt, claim.first) for claim in taken] == [(1, True)] * 3


@pytest.mark.parametrize("offset_s", [-39_600, 0, 19_800, 21_208])
def test_the_eta_is_read_to_the_millisecond_in_any_zone(store: redis.Redis, offset_s: int) -> None:
    eta = datetime.now(timezone(timedelta(seconds=offset_s))) + timedelta(days=400)
    push(store, "a", eta=eta.isoformat())
    assert take(store) == []
    ((_, due_ms),) = store.zrange(SCHEDULED, 0, -1, withscores=True)
    assert abs(due_ms - eta.timestamp() * 1e3) <= 1


@pytest.mark.parametrize(
    "eta",
    ["1960-05-06T07:08:09+00:00", "2000-02-29T12:00:00", "2000-02-29T12:00:00.5Z", "2000-02-29"],
)
def test_a_past_eta_is_due_and_a_time_without_a_zone_is_utc(store: redis.Redis, eta: str) -> None:
    push(store, "a", eta=eta)
    assert take(store) == []
    inbox_watch.look(store, "toy", wakes_anyway=True)
    (claim,) = take(store)
    parsed = datetime.fromisoformat(eta).replace(tzinfo=UTC)
    assert claim.due_ms == round(parsed.timestamp() * 1e3)


@pytest.mark.parametrize("eta", ["tomorrow", 5, {}, "2100-01-01T00:00:00 at noon"])
def test_an_eta_that_cannot_be_read_is_left_to_the_worker(store: redis.Redis, eta: object) -> None:
    store.lpush(QUEUE, json.dumps(envelope("", headers={"id": "a", "eta": eta})))
    (claim,) = take(store)
    assert claim.due_ms is None


def test_a_job_waits_for_its_eta_although_the_worker_that_read_it_died(store: redis.Redis) -> None:
    push(store, "a", eta=in_s(3600))
    with dying_after("claim"), suppress(redis.ConnectionError):
        take(store)
    set_leases(store, {"a": 1})
    assert sweep(store) == ["a"]
    assert take(store) == []
    assert store.zscore(SCHEDULED, "a")
    let_come_due(store, "a")
    (claim,) = take(store)
    assert claim.attempt == 2, "the death counts, the wait does not"


def test_a_second_copy_of_a_scheduled_message_is_dropped(store: redis.Redis) -> None:
    push(store, "a", "a", eta=in_s(3600))
    assert take(store) == []
    assert store.zcard(SCHEDULED) == 1
    let_come_due(store, "a")
    assert len(take(store)) == 1
    assert take(store) == []


def test_jobs_that_are_due_share_with_those_that_other_tenants_sent_meanwhile(
    store: redis.Redis, producer: Client
) -> None:
    later = [f"later{n:02}" for n in range(20)]
    push(store, *later, eta=in_s(3600))
    while look(store).look_again_s is not None:
        pass
    assert store.zcard(SCHEDULED) == 20
    others = [producer.submit(prompt="x", tenant="other", max_tokens=200).id for _ in range(20)]
    let_come_due(store, *later)
    order = [claim.job_id for _ in range(40) for claim in take(store, limit=1)]
    assert 8 <= len(set(order[:20]) & set(later)) <= 12, order
    assert [job_id for job_id in order if job_id in later] == later
    assert [job_id for job_id in order if job_id in others] == others


@pytest.mark.parametrize("fate", ["waits", "cancelled", "due and cancelled", "due"])
def test_a_tenant_is_charged_for_a_job_only_from_its_eta_on(
    store: redis.Redis, producer: Client, fate: str
) -> None:
    long = envelope("x" * 40_000, headers={"id": "long", "eta": in_s(3600)})
    store.lpush(QUEUE, json.dumps(long))
    assert take(store) == []
    others = [producer.submit(prompt="x", tenant="other", max_tokens=200).id for _ in range(4)]
    if fate.startswith("due"):
        let_come_due(store, "long")
    if fate.endswith("cancelled"):
        assert cancel(store, "long", SETTINGS) == "queued"
    push(store, "a", "b")
    inbox_watch.look(store, "toy")
    order = [claim.job_id for _ in range(7) for claim in take(store, limit=1)]
    if fate == "due":
        assert order[-2:] == ["a", "b"], order
    else:
        assert {"a", "b"} < set(order[:4]), order
        assert sorted(order) == sorted([*others, "a", "b"])


def test_a_cancel_ends_a_scheduled_job_at_once(store: redis.Redis, producer: Client) -> None:
    push(store, "a", eta=in_s(3600))
    assert take(store) == []
    assert cancel(store, "a", SETTINGS) == "queued"
    assert producer.job("a").status().state == "cancelled"
    assert not store.zcard(SCHEDULED)
    let_come_due(store, "a")
    assert take(store) == []


def test_a_job_has_waited_since_its_eta(store: redis.Redis) -> None:
    announce(store)
    push(store, "a", eta=in_s(3600))
    assert take(store) == []
    store.hset(keys.job("a"), "came_ms", 1)
    let_come_due(store, "a")
    store.hset(keys.job("a"), "eta_ms", round(store.time()[0] * 1e3))
    waited_s = waiting(store, "toy").queues["normal"].oldest_s
    assert waited_s is not None
    assert waited_s < 60
    # Its dead letter was retried long after.
    store.hset(keys.job("a"), mapping={"eta_ms": 1, "came_ms": round(store.time()[0] * 1e3)})
    waited_s = waiting(store, "toy").queues["normal"].oldest_s
    assert waited_s is not None
    assert waited_s < 60


def test_a_cancel_between_a_claim_and_its_wait_for_the_eta_ends_the_job_with_the_next_claim(
    store: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, "a", eta=in_s(3600))
    real = claims.run_script

    def run(client: redis.Redis, name: str, *args: Any) -> Any:
        if name == "release":
            assert cancel(client, "a", SETTINGS) == "running"
        return real(client, name, *args)

    monkeypatch.setattr(claims, "run_script", run)
    first = look(store)
    assert (first.claims, first.look_again_s) == ([], 0)
    monkeypatch.undo()
    (claim,) = take(store)
    assert claim.cancelled
