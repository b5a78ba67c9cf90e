"""Which scripts ring, for whom, and how often."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import redis

from llorch_worker.broker import claims, keys, queues, watch
from llorch_worker.broker.claims import ClaimRequest
from llorch_worker.broker.queues import route, worker_queue
from llorch_worker.client import Client
from tests.broker.jobs import TERMS, look, note_seen, push, take
from tests.broker.test_maxmemory import fill
from tests.messages import QUEUE

BELL = keys.bell(QUEUE)
OWN_QUEUE = worker_queue("toy", "gpu0@host")


def rings(store: redis.Redis, queue: str = QUEUE) -> int:
    return int(store.llen(keys.bell(queue)))


def test_a_client_rings_for_its_job(producer: Client) -> None:
    producer.submit(prompt="x", priority="high")
    assert (rings(producer.redis, f"{QUEUE}:high"), rings(producer.redis)) == (1, 0)
    producer.submit(prompt="x", priority="low")
    assert rings(producer.redis) == 1


def test_a_client_that_sends_to_one_worker_rings_for_that_worker_for_a_while(
    producer: Client,
) -> None:
    note_seen(producer.redis, OWN_QUEUE)
    producer.submit(prompt="x", worker="gpu0@host")
    assert (rings(producer.redis, OWN_QUEUE), rings(producer.redis)) == (1, 0)
    assert 0 < producer.redis.ttl(keys.bell(OWN_QUEUE)) <= 60


def test_a_bell_holds_one_ring_however_many_jobs_wait(producer: Client) -> None:
    for _ in range(5):
        producer.submit(prompt="x")
        watch.ring_for_all(producer.redis, "toy")
        assert rings(producer.redis) == 1


def test_a_watcher_that_leaves_rings_for_what_waits(store: redis.Redis) -> None:
    assert watch.lease(store, "toy").take()
    push(store, "a")
    watch.leave(store, "toy")
    assert rings(store) == 1
    assert watch.lease(store, "toy").take()


@pytest.mark.parametrize("priority", ["high", "normal"])
def test_a_ring_is_passed_on_however_fresh_its_job_is(producer: Client, priority: str) -> None:
    """The ring of a job that came just now is not lost with a worker that takes no more."""
    queue = queues.queue_of(route("toy", priority).list_key)
    producer.submit(prompt="x", priority=priority)
    assert producer.redis.lpop(keys.bell(queue))
    watch.pass_ring_on(producer.redis, "toy", queues.queues("toy"))
    assert rings(producer.redis, queue) == 1


def test_a_worker_gets_back_the_ring_for_its_own_queue(producer: Client) -> None:
    """Nobody else looks there, so a full worker would not hear of a high job again."""
    note_seen(producer.redis, OWN_QUEUE)
    producer.submit(prompt="x", worker="gpu0@host", priority="high")
    assert producer.redis.lpop(keys.bell(f"{OWN_QUEUE}:high"))
    watch.pass_ring_on(producer.redis, "toy", queues.queues("toy", "gpu0@host"))
    assert rings(producer.redis, f"{OWN_QUEUE}:high") == 1


def test_a_claim_that_takes_all_jobs_leaves_no_ring(producer: Client) -> None:
    for priority in ("high", "normal", "low"):
        producer.submit(prompt="x", priority=priority)
    assert len(take(producer.redis)) == 3
    assert rings(producer.redis) == rings(producer.redis, f"{QUEUE}:high") == 0


def test_a_claim_that_leaves_jobs_rings_for_the_next_worker(store: redis.Redis) -> None:
    push(store, "a", "b", "c")
    store.lpush(route("toy", "high").list_key, *store.lrange(QUEUE, 0, 1))
    assert len(take(store, limit=1)) == 1
    assert rings(store) == rings(store, f"{QUEUE}:high") == 1
    assert len(take(store, limit=1)) == 1
    assert (rings(store), rings(store, f"{QUEUE}:high")) == (1, 0)


def test_a_worker_leaves_the_others_their_share_of_many_jobs(store: redis.Redis) -> None:
    note_seen(store, *(worker_queue("toy", f"gpu{n}@host") for n in range(4)))
    note_seen(store, worker_queue("toy", "dead@host"), ago_s=20)
    note_seen(store, worker_queue("toys", "gpu0@host"))
    push(store, *(f"job{number}" for number in range(9)))
    # What is left of 9 after each: 6, 4, 3, 2, 1, 0.
    assert [len(take(store)) for _ in range(6)] == [3, 2, 1, 1, 1, 1]
    assert rings(store) == 0


def test_a_worker_alone_takes_all_it_has_room_for(store: redis.Redis) -> None:
    note_seen(store, OWN_QUEUE)
    push(store, *(f"job{number}" for number in range(9)))
    assert len(take(store, limit=8)) == 8


def test_a_worker_takes_all_jobs_of_its_own_queue(store: redis.Redis) -> None:
    note_seen(store, *(worker_queue("toy", f"gpu{n}@host") for n in range(100)))
    push(store, *(f"job{number}" for number in range(9)))
    store.rename(QUEUE, OWN_QUEUE)
    push(store, "a", "b")
    assert own_claim(store, limit=20) == [*(f"job{number}" for number in range(9)), "a"]


def test_a_claim_does_not_ring_for_a_suspect_that_may_not_run_here(store: redis.Redis) -> None:
    """Otherwise two workers that both hold suspects would ring for each other for ever."""
    push(store, "a", "b")
    for claim in take(store):
        claims.blame(store, claim, max_attempts=3, alone=False)
    first = take(store, limit=1)
    assert first[0].suspect
    store.delete(BELL)
    taken = look(store, held=first)
    assert (taken.claims, taken.look_again_s) == ([], 0.01)
    assert rings(store) == 0
    watch.ring_for_all(store, "toy")
    assert rings(store) == 1, "another worker may take it"


def test_jobs_without_a_ring_get_one(store: redis.Redis) -> None:
    lists = [QUEUE, route("toy", "high").list_key, OWN_QUEUE, queues.suspects("toy")]
    for name in lists:
        store.lpush(name, "a job")
    watch.ring_for(store, lists[1:3])
    assert [rings(store, queue) for queue in (QUEUE, f"{QUEUE}:high", OWN_QUEUE)] == [0, 1, 1]
    watch.ring_for_all(store, "toy")
    assert rings(store) == 1


def test_empty_lists_and_lists_of_other_models_get_no_ring(store: redis.Redis) -> None:
    store.lpush("llorch.toys", "a job")
    watch.ring_for_all(store, "toy")
    assert store.keys("llorch:bell:*") == []


@pytest.mark.parametrize("queue", [*queues.queues("toy", "gpu0@host")])
def test_each_list_has_the_bell_of_its_queue(store: redis.Redis, queue: str) -> None:
    for name in queues.lists([queue]):
        store.flushall()
        store.lpush(name, "a job")
        watch.ring_for(store, [name])
        others = {keys.full_bell(queue)}
        assert set(store.keys("llorch:bell:*")) - others == {keys.bell(queue)}, name


def test_a_claim_that_leaves_jobs_in_the_workers_own_list_does_not_ring(store: redis.Redis) -> None:
    """It looks there in any case, and would only wake itself."""
    for to in queues.claimed_lists([OWN_QUEUE]):
        push(store, "a", "b")
        store.rename(QUEUE, to)
        assert own_claim(store, limit=1) == ["a"]
        assert rings(store, OWN_QUEUE) == rings(store) == 0
        store.flushall()


def test_a_claim_that_settles_many_bytes_of_no_job_goes_on_at_once(store: redis.Redis) -> None:
    store.lpush(QUEUE, *(f"junk{number:0>1000000}" for number in range(5)))
    push(store, "a")
    taken = look(store)
    assert (taken.claims, taken.look_again_s) == ([], 0)
    assert [claim.job_id for claim in look(store).claims] == ["a"]


def own_claim(store: redis.Redis, *, limit: int) -> list[str]:
    consumed = queues.queues("toy", "gpu0@host")
    taken = claims.claim(store, ClaimRequest(("toy",), consumed, limit, "gpu0@host"), TERMS)
    return [claim.job_id for claim in taken.claims]


@pytest.mark.parametrize(("due_ms", "rung"), [(-1_000, 1), (300_000, 0), (900_000, 0)])
def test_a_scheduled_job_gets_a_ring_once_it_is_due(
    store: redis.Redis, monkeypatch: pytest.MonkeyPatch, due_ms: int, rung: int
) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 600.0)
    push(store, "a", eta=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    assert take(store) == []
    seconds, microseconds = store.time()
    store.zadd(queues.scheduled("toy"), {"a": seconds * 1000 + round(microseconds / 1000) + due_ms})
    store.delete(BELL)
    look_again_s = watch.ring_for_all(store, "toy")
    assert look_again_s is not None
    # Not at once, if it was due: perhaps no worker has room.
    assert 0 < look_again_s <= 300 if due_ms == 300_000 else look_again_s == 600
    assert rings(store) == rung


def test_the_watcher_releases_due_jobs_to_their_own_lists(store: redis.Redis) -> None:
    in_an_hour = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    normal = [f"normal{number}" for number in range(150)]
    push(store, *normal, "high", eta=in_an_hour)
    store.lmove(QUEUE, route("toy", "high").list_key, "LEFT", "LEFT")
    assert take(store, limit=200) == []
    assert take(store) == []
    watch.ring_for_all(store, "toy")
    assert (rings(store), rings(store, f"{QUEUE}:high")) == (0, 0)
    store.zadd(queues.scheduled("toy"), dict.fromkeys(normal, 1) | {"high": 2})
    assert watch.ring_for_all(store, "toy") == 0.001, "a call releases a hundred"
    watch.ring_for_all(store, "toy")
    assert (rings(store), rings(store, f"{QUEUE}:high")) == (1, 1)
    assert urgent(store) == ["high"]
    assert len(take(store, limit=200)) == 150


@pytest.mark.parametrize("queue", [f"{QUEUE}:high", QUEUE, f"{OWN_QUEUE}:high", OWN_QUEUE])
def test_the_watcher_moves_the_jobs_of_every_list_that_nobody_claims_from(
    store: redis.Redis, queue: str
) -> None:
    for name in queues.moved_lists(queue):
        store.lpush(name, f"{name} first", f"{name} second")
    watch.ring_for_all(store, "toy")
    watch.ring_for(store, queues.worker_lists(OWN_QUEUE))
    assert rings(store, queue) == 1
    plain = queues.claimed_lists([queue])
    assert set(store.scan_iter("llorch.*")) == set(plain)
    for list_key in plain:
        priority = queues.priority_of(list_key)
        moved = [name for name in queues.moved_lists(queue) if queues.priority_of(name) == priority]
        in_order = [f"{name} {place}" for name in moved for place in ("first", "second")]
        assert store.lrange(list_key, 0, -1)[::-1] == in_order


def test_at_maxmemory_claims_and_watchers_ring(store: redis.Redis) -> None:
    push(store, "a", "b", "c")
    fill(store)
    assert len(take(store, limit=1)) == 1
    assert rings(store) == 1
    store.delete(BELL)
    watch.ring_for_all(store, "toy")
    assert rings(store) == 1


def high_jobs(store: redis.Redis, *job_ids: str) -> None:
    for job_id in job_ids:
        push(store, job_id)
        store.lmove(QUEUE, route("toy", "high").list_key, "RIGHT", "LEFT")


def urgent(store: redis.Redis, limit: int = 4) -> list[str]:
    """What a worker without room claims."""
    high = (f"{OWN_QUEUE}:high", f"{QUEUE}:high")
    request = ClaimRequest(("toy",), high, limit, "gpu0@host", urgent=True)
    return [claim.job_id for claim in claims.claim(store, request, TERMS).claims]


def test_workers_without_room_are_rung_for_high_jobs_only(producer: Client) -> None:
    full_bell = keys.full_bell(f"{QUEUE}:high")
    producer.submit(prompt="x")
    producer.submit(prompt="x", priority="low")
    assert not producer.redis.exists(full_bell)
    producer.submit(prompt="x", priority="high")
    assert producer.redis.llen(full_bell) == 1


def test_a_worker_without_room_leaves_a_high_job_to_one_with_room_that_took_the_ring(
    store: redis.Redis,
) -> None:
    high_jobs(store, "a", "b")
    assert urgent(store) == []
    watch.ring_for_all(store, "toy")
    assert urgent(store) == ["a", "b"]
    assert rings(store, f"{QUEUE}:high") == store.exists(keys.full_bell(f"{QUEUE}:high")) == 0


def test_a_worker_without_room_that_may_take_no_high_job_leaves_the_ring(
    store: redis.Redis,
) -> None:
    push(store, "low")
    high_jobs(store, "high")
    watch.ring_for_all(store, "toy")
    store.set(f"{keys.passed('toy')}{keys.FULL_SUFFIX}", 1)
    assert urgent(store) == []
    assert rings(store, f"{QUEUE}:high") == 1, "for a worker with room"
    assert not store.exists(keys.full_bell(f"{QUEUE}:high")), "which would wake this one for ever"


def test_a_worker_without_room_that_leaves_high_jobs_rings_for_the_next(store: redis.Redis) -> None:
    high_jobs(store, "a", "b")
    watch.ring_for_all(store, "toy")
    assert urgent(store, limit=1) == ["a"]
    assert rings(store, f"{QUEUE}:high") == store.llen(keys.full_bell(f"{QUEUE}:high")) == 1
    assert urgent(store) == ["b"]


def test_a_worker_without_room_takes_high_jobs_of_its_own_queue_without_asking_others(
    store: redis.Redis,
) -> None:
    high_jobs(store, "a")
    store.rename(f"{QUEUE}:high", f"{OWN_QUEUE}:high")
    assert urgent(store) == ["a"]
