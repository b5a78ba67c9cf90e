"""The rule of age: a lower priority behind endless urgent jobs goes first once in so much time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from llorch_worker.broker import keys, queues
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import ClaimRequest
from llorch_worker.broker.queues import route
from llorch_worker.broker.waiting import inbox_watch
from tests.broker.steps import TERMS, push, take
from tests.messages import QUEUE
from tests.store import write_record

HIGH, LOW = route("toy", "high").list_key, route("toy", "low").list_key
MINUTE_MS = 60_000


def waiting(store: redis.Redis, list_key: str, *job_ids: str, ago_ms: int = 0) -> None:
    """Pushes as a stock producer does, and moves them out of the inbox."""
    for job_id in job_ids:
        push(store, job_id)
        store.lmove(QUEUE, list_key, "LEFT", "LEFT")
    inbox_watch.look(store, "toy")
    for job_id in job_ids:
        write_record(store, job_id, came_ms=now_ms(store) - ago_ms)


def now_ms(store: redis.Redis) -> int:
    seconds, microseconds = store.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def claimed(store: redis.Redis, count: int, low_waits_ms: int = MINUTE_MS) -> list[str]:
    """The next jobs, claimed one by one."""
    terms = replace(TERMS, low_waits_at_most_ms=low_waits_ms)
    return [claim.job_id for _ in range(count) for claim in take(store, terms, limit=1)]


def test_a_lower_priority_waits_behind_more_urgent_ones(store: redis.Redis) -> None:
    waiting(store, LOW, "low1")
    waiting(store, QUEUE, "normal1")
    waiting(store, HIGH, "high1", "high2")
    assert claimed(store, 9) == ["high1", "high2", "normal1", "low1"]


def test_its_first_job_goes_first_once_it_has_waited_for_the_bound(store: redis.Redis) -> None:
    waiting(store, LOW, "low1", "low2", ago_ms=MINUTE_MS)
    waiting(store, HIGH, "high1", "high2", "high3")
    assert claimed(store, 9) == ["low1", "high1", "high2", "high3", "low2"]


def test_a_lower_priority_goes_first_once_in_the_bound_however_old_its_jobs_are(
    store: redis.Redis,
) -> None:
    waiting(store, LOW, *(f"low{n}" for n in range(50)), ago_ms=100 * MINUTE_MS)
    waiting(store, HIGH, *(f"high{n}" for n in range(50)))
    assert claimed(store, 3) == ["low0", "high0", "high1"]
    store.hincrby(keys.aged("toy"), "2", -MINUTE_MS)
    assert claimed(store, 3) == ["low1", "high2", "high3"]


def test_a_clock_that_is_set_back_keeps_no_class_from_going_first(store: redis.Redis) -> None:
    waiting(store, LOW, "low1", "low2", ago_ms=MINUTE_MS)
    waiting(store, HIGH, "high1", "high2")
    assert claimed(store, 1) == ["low1"]
    store.hincrby(keys.aged("toy"), "2", 120 * MINUTE_MS)
    assert claimed(store, 1) == ["low2"]


def test_one_call_gives_one_job_for_its_age(store: redis.Redis) -> None:
    waiting(store, LOW, "low1", "low2", ago_ms=MINUTE_MS)
    waiting(store, HIGH, *(f"high{n}" for n in range(9)))
    terms = replace(TERMS, low_waits_at_most_ms=0)
    assert [claim.job_id for claim in take(store, terms, limit=3)] == ["low1", "high0", "high1"]


def test_of_two_lower_priorities_the_one_that_has_waited_longer_goes_first(
    store: redis.Redis,
) -> None:
    waiting(store, LOW, "low1", "low2", ago_ms=3 * MINUTE_MS)
    waiting(store, QUEUE, "normal1", "normal2", ago_ms=2 * MINUTE_MS)
    waiting(store, HIGH, *(f"high{n}" for n in range(9)))
    assert claimed(store, 4) == ["low1", "normal1", "high0", "high1"]


def urgent(store: redis.Redis, low_waits_ms: int = MINUTE_MS) -> list[str]:
    """The job that a worker without room gets, when none with room has taken the wake-up."""
    store.lpush(keys.wake(f"{QUEUE}{queues.HIGH_SUFFIX}"), 1)
    found = claims.claim(
        store,
        ClaimRequest("toy", (f"{QUEUE}{queues.HIGH_SUFFIX}",), 1, "w@h", urgent=True),
        replace(TERMS, low_waits_at_most_ms=low_waits_ms),
    )
    return [claim.job_id for claim in found.claims]


def test_a_worker_without_room_gets_no_high_job_while_a_lower_one_is_due(
    store: redis.Redis,
) -> None:
    waiting(store, LOW, "low1", "low2")
    waiting(store, HIGH, *(f"high{n}" for n in range(9)))
    assert urgent(store) == ["high0"]
    write_record(store, "low1", came_ms=now_ms(store) - MINUTE_MS)
    assert urgent(store) == []
    assert claimed(store, 1) == ["low1"], "as soon as there is room"
    assert urgent(store) == ["high1"]


def test_a_worker_without_room_leaves_a_wake_up_that_another_has_taken(store: redis.Redis) -> None:
    waiting(store, HIGH, "high1")
    store.delete(keys.wake(f"{QUEUE}{queues.HIGH_SUFFIX}"))
    request = ClaimRequest("toy", (f"{QUEUE}{queues.HIGH_SUFFIX}",), 1, "w@h", urgent=True)
    assert claims.claim(store, request, TERMS).claims == []


@pytest.mark.parametrize("low_waits_ms", [0, MINUTE_MS])
def test_a_priority_that_nothing_passes_never_goes_first_for_its_age(
    store: redis.Redis, low_waits_ms: int
) -> None:
    waiting(store, LOW, "low1", "low2", ago_ms=MINUTE_MS)
    assert claimed(store, 2, low_waits_ms) == ["low1", "low2"]
    assert not store.exists(keys.aged("toy"))
