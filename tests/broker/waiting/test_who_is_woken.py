"""Which scripts wake a worker, for whom, and how often."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import redis

from llorch_worker.broker import keys, queues
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import ClaimRequest
from llorch_worker.broker.queues import Route, place_of, route
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.client import Client
from llorch_worker.settings import Settings
from llorch_worker.worker.inbox_watcher import InboxWatcher
from tests.broker.steps import TERMS, look, note_seen, push, take
from tests.broker.test_maxmemory import fill
from tests.messages import QUEUE
from tests.waiting import wait_until

WAKE_KEY = keys.wake(QUEUE)
OWN_QUEUE = place_of("toy", "gpu0@host")


def wake_ups(store: redis.Redis, queue: str = QUEUE) -> int:
    return int(store.llen(keys.wake(queue)))


def test_a_client_wakes_a_worker_for_its_job(producer: Client) -> None:
    producer.submit(prompt="x", priority="high")
    assert (wake_ups(producer.redis, f"{QUEUE}:high"), wake_ups(producer.redis)) == (1, 0)
    producer.submit(prompt="x", priority="low")
    assert wake_ups(producer.redis) == 1


def test_a_wake_key_holds_one_wake_up_however_many_jobs_wait(producer: Client) -> None:
    for _ in range(5):
        producer.submit(prompt="x")
        inbox_watch.look(producer.redis, "toy", wakes_anyway=True)
        assert wake_ups(producer.redis) == 1


def test_a_watcher_that_leaves_wakes_another_for_what_waits(store: redis.Redis) -> None:
    push(store, "a")
    watcher = InboxWatcher(store, "toy", Settings(), on_repeated=print)
    watcher.start()
    wait_until(lambda: wake_ups(store))
    store.delete(keys.wake(QUEUE))
    watcher.close()
    assert wake_ups(store) == 1
    assert inbox_watch.lease(store, "toy").take()


def test_a_watcher_tells_of_messages_whose_jobs_had_ended(store: redis.Redis) -> None:
    for ended in (False, True):
        push(store, "a")
        told: list[str] = []
        inbox_watch.look(store, "toy", on_repeated=told.append)
        assert told == (["a"] if ended else [])
        for claim in take(store):
            claims.end(store, claim, TERMS)


@pytest.mark.parametrize("priority", ["high", "normal"])
def test_a_wake_up_is_passed_on_however_fresh_its_job_is(producer: Client, priority: str) -> None:
    """The wake-up for a job that came just now is not lost with a worker that takes no more."""
    queue = queues.queue_of(route("toy", priority).list_key)
    producer.submit(prompt="x", priority=priority)
    assert producer.redis.lpop(keys.wake(queue))
    inbox_watch.look(producer.redis, "toy", wakes_anyway=True)
    assert wake_ups(producer.redis, queue) == 1


def test_a_claim_that_takes_all_jobs_leaves_no_wake_up(producer: Client) -> None:
    for priority in ("high", "normal", "low"):
        producer.submit(prompt="x", priority=priority)
    assert len(take(producer.redis)) == 3
    assert wake_ups(producer.redis) == wake_ups(producer.redis, f"{QUEUE}:high") == 0


def test_a_claim_that_leaves_jobs_wakes_the_next_worker(store: redis.Redis) -> None:
    push(store, "a", "b", "c")
    store.lpush(route("toy", "high").list_key, *store.lrange(QUEUE, 0, 1))
    assert len(take(store, limit=1)) == 1
    assert wake_ups(store) == wake_ups(store, f"{QUEUE}:high") == 1
    assert len(take(store, limit=1)) == 1
    assert (wake_ups(store), wake_ups(store, f"{QUEUE}:high")) == (1, 0)


@pytest.mark.parametrize(
    ("name", "woken"),
    [
        ("llorch.toy", {keys.wake(QUEUE)}),
        (Route("llorch.toy", 9).list_key, {keys.wake(QUEUE)}),
        ("llorch.toy:9", {keys.wake(QUEUE)}),
        ("llorch.toy:high", {keys.wake(f"{QUEUE}:high"), keys.full_wake(f"{QUEUE}:high")}),
        ("llorch.toy:high:3", {keys.wake(f"{QUEUE}:high"), keys.full_wake(f"{QUEUE}:high")}),
    ],
)
def test_what_comes_to_the_inbox_wakes_a_worker_before_it_is_moved(
    store: redis.Redis, name: str, woken: set[str]
) -> None:
    for _ in range(2):
        inbox_watch.wake(store, "toy", [name])
    assert set(store.keys(keys.wake("*"))) == woken
    assert all(store.llen(key) == 1 for key in woken)


def test_a_worker_leaves_the_others_their_share_of_many_jobs(store: redis.Redis) -> None:
    note_seen(store, *(place_of("toy", f"gpu{n}@host") for n in range(4)))
    note_seen(store, place_of("toy", "dead@host"), ago_s=20)
    note_seen(store, place_of("toys", "gpu0@host"))
    push(store, *(f"job{number}" for number in range(9)))
    # What is left of 9 after each: 6, 4, 3, 2, 1, 0.
    assert [len(take(store)) for _ in range(6)] == [3, 2, 1, 1, 1, 1]
    assert wake_ups(store) == 0


def test_a_worker_alone_takes_all_it_has_room_for(store: redis.Redis) -> None:
    note_seen(store, OWN_QUEUE)
    push(store, *(f"job{number}" for number in range(9)))
    assert len(take(store, limit=8)) == 8


def test_a_claim_wakes_nobody_for_a_suspect_that_may_not_run_here(store: redis.Redis) -> None:
    """Otherwise two workers that both hold suspects would wake each other for ever."""
    push(store, "a", "b")
    for claim in take(store):
        claims.blame(store, claim, max_attempts=3, alone=False)
    first = take(store, limit=1)
    assert first[0].suspect
    store.delete(WAKE_KEY)
    taken = look(store, held=first)
    assert not taken.claims
    # A quarter of the time that the suspect has run.
    assert taken.look_again_s is not None
    assert 0.01 <= taken.look_again_s <= 0.2
    assert wake_ups(store) == 0
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert wake_ups(store) == 1, "another worker may take it"


def test_a_claim_that_tries_a_job_for_its_age_and_for_its_class_wakes_the_next_worker(
    store: redis.Redis,
) -> None:
    push(store, "unfit", "b", "c", "d")
    store.rename(QUEUE, route("toy", "low").list_key)
    inbox_watch.look(store, "toy")
    for name in ("unfit", "b", "c", "d"):
        store.hset(keys.job(name), "came_ms", 1)
    store.hset(keys.job("unfit"), "least_context", 512)
    store.zadd(keys.contexts("toy"), {"512": 1e15})
    push(store, "a")
    inbox_watch.look(store, "toy")
    request = ClaimRequest("toy", queues.queues("toy"), 3, "w@h", max_context=256)
    taken = claims.claim(store, request, TERMS)
    assert [claim.job_id for claim in taken.claims] == ["b", "a", "c"]
    assert wake_ups(store) == 1


def test_jobs_without_a_wake_up_get_one(store: redis.Redis) -> None:
    push(store, "a")
    high_jobs(store, "b")
    inbox_watch.look(store, "toy")
    store.delete(WAKE_KEY, keys.wake(f"{QUEUE}:high"))
    inbox_watch.look(store, "toy")
    assert wake_ups(store) == 0, "somebody has been woken for them"
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert wake_ups(store) == wake_ups(store, f"{QUEUE}:high") == 1


def test_empty_lists_and_lists_of_other_models_get_no_wake_up(store: redis.Redis) -> None:
    store.lpush("llorch.toys", "a job")
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert store.keys("llorch:wake:*") == []
    assert store.llen("llorch.toys") == 1


def test_a_claim_that_settles_many_bytes_of_no_job_goes_on_at_once(store: redis.Redis) -> None:
    store.lpush(QUEUE, *(f"junk{number:0>1000000}" for number in range(5)))
    push(store, "a")
    taken = look(store)
    assert (taken.claims, taken.look_again_s) == ([], 0)
    assert [claim.job_id for claim in look(store).claims] == ["a"]


@pytest.mark.parametrize(("due_ms", "expected"), [(-1_000, 1), (300_000, 0), (900_000, 0)])
def test_a_scheduled_job_gets_a_wake_up_once_it_is_due(
    store: redis.Redis, monkeypatch: pytest.MonkeyPatch, due_ms: int, expected: int
) -> None:
    monkeypatch.setattr(inbox_watch, "LOOK_S", 600.0)
    push(store, "a", eta=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    assert take(store) == []
    seconds, microseconds = store.time()
    store.zadd(keys.scheduled("toy"), {"a": seconds * 1000 + round(microseconds / 1000) + due_ms})
    store.delete(WAKE_KEY)
    look_again_s = inbox_watch.look(store, "toy")
    if expected:
        assert look_again_s is None
        assert wake_ups(store) == expected
        return
    assert look_again_s is not None
    assert 0 < look_again_s <= due_ms / 1e3 + 0.001, "rounded up"
    assert wake_ups(store) == expected


def test_the_watcher_releases_due_jobs_to_their_own_priorities(store: redis.Redis) -> None:
    in_an_hour = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    normal = [f"normal{number}" for number in range(150)]
    push(store, *normal, "high", eta=in_an_hour)
    store.lmove(QUEUE, route("toy", "high").list_key, "LEFT", "LEFT")
    while store.exists(*queues.inbox_of("toy")):
        assert take(store, limit=200) == []
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert (wake_ups(store), wake_ups(store, f"{QUEUE}:high")) == (0, 0)
    store.zadd(keys.scheduled("toy"), dict.fromkeys(normal, 1) | {"high": 2})
    assert inbox_watch.look(store, "toy", wakes_anyway=True) == 0.001, "a call releases a hundred"
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert (wake_ups(store), wake_ups(store, f"{QUEUE}:high")) == (1, 1)
    assert urgent(store) == ["high"]
    assert len(take(store, limit=200)) == 150


def test_at_maxmemory_claims_and_watchers_wake_workers(store: redis.Redis) -> None:
    push(store, "a", "b", "c")
    fill(store)
    assert len(take(store, limit=1)) == 1
    assert wake_ups(store) == 1
    store.delete(WAKE_KEY)
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert wake_ups(store) == 1


def high_jobs(store: redis.Redis, *job_ids: str) -> None:
    for job_id in job_ids:
        push(store, job_id)
        store.lmove(QUEUE, route("toy", "high").list_key, "RIGHT", "LEFT")


def urgent(store: redis.Redis, limit: int = 4) -> list[str]:
    """What a worker without room claims."""
    request = ClaimRequest("toy", (f"{QUEUE}:high",), limit, "gpu0@host", urgent=True)
    return [claim.job_id for claim in claims.claim(store, request, TERMS).claims]


def test_workers_without_room_are_woken_for_high_jobs_only(producer: Client) -> None:
    full_wake = keys.full_wake(f"{QUEUE}:high")
    producer.submit(prompt="x")
    producer.submit(prompt="x", priority="low")
    assert not producer.redis.exists(full_wake)
    producer.submit(prompt="x", priority="high")
    assert producer.redis.llen(full_wake) == 1


def test_a_worker_without_room_leaves_a_high_job_to_one_with_room_that_took_the_wake_up(
    store: redis.Redis,
) -> None:
    high_jobs(store, "a", "b")
    assert urgent(store) == []
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert urgent(store) == ["a", "b"]
    assert wake_ups(store, f"{QUEUE}:high") == store.exists(keys.full_wake(f"{QUEUE}:high")) == 0


def test_a_worker_without_room_that_leaves_high_jobs_wakes_the_next(store: redis.Redis) -> None:
    high_jobs(store, "a", "b")
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert urgent(store, limit=1) == ["a"]
    assert wake_ups(store, f"{QUEUE}:high") == store.llen(keys.full_wake(f"{QUEUE}:high")) == 1
    assert urgent(store) == ["b"]
