"""Jobs behind more urgent ones: when they get their turn, also among endless urgent ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from llorch_worker.broker import claims, keys, queues
from llorch_worker.broker.claims import ClaimRequest
from llorch_worker.broker.queues import route
from tests.broker.jobs import TERMS, push, take
from tests.messages import QUEUE

HIGH, LOW = route("toy", "high").list_key, route("toy", "low").list_key
MOST_PASSED = 16


def waiting(store: redis.Redis, list_key: str, *job_ids: str) -> None:
    """Pushes as a stock producer does."""
    for job_id in job_ids:
        push(store, job_id)
        store.lmove(QUEUE, list_key, "LEFT", "LEFT")


def claimed(store: redis.Redis, count: int, low_waits_ms: int = 10**9) -> list[str]:
    """The next jobs, claimed one by one."""
    terms = replace(TERMS, low_waits_at_most_ms=low_waits_ms)
    return [claim.job_id for _ in range(count) for claim in take(store, terms, limit=1)]


def passed_for(store: redis.Redis, ms: int) -> None:
    """As if the low list had been passed for so long."""
    seconds, microseconds = store.time()
    now_ms = int(seconds) * 1000 + int(microseconds) // 1000
    store.hset(keys.passed("toy"), LOW, now_ms - ms)


def test_after_sixteen_more_urgent_jobs_the_first_of_a_lower_list_gets_its_turn(
    store: redis.Redis,
) -> None:
    waiting(store, LOW, "low1", "low2")
    waiting(store, HIGH, *(f"high{n}" for n in range(50)))
    order = claimed(store, 40)
    assert [order.index(name) for name in ("low1", "low2")] == [MOST_PASSED, 2 * MOST_PASSED + 1]
    assert len(order) == 40


def test_lower_lists_take_turns(store: redis.Redis) -> None:
    waiting(store, LOW, "low1", "low2")
    waiting(store, QUEUE, "normal1", "normal2")
    waiting(store, HIGH, *(f"high{n}" for n in range(99)))
    order = [name for name in claimed(store, 70) if not name.startswith("high")]
    assert order == ["normal1", "low1", "normal2", "low2"]


def test_a_lower_list_that_was_passed_for_its_bound_gets_its_turn_at_the_next_claim(
    store: redis.Redis,
) -> None:
    waiting(store, LOW, "low1", "low2")
    waiting(store, HIGH, *(f"high{n}" for n in range(9)))
    assert claimed(store, 1) == ["high0"]
    passed_for(store, 60_000)
    assert claimed(store, 2, low_waits_ms=60_000) == ["low1", "high1"]
    passed_for(store, 50_000)
    assert claimed(store, 1, low_waits_ms=60_000) == ["high2"]


@pytest.mark.parametrize("at_first", [["low0"], ["low0", "low1"]], ids=["empty", "first"])
def test_jobs_of_a_list_that_was_empty_or_first_have_not_been_passed_since_before(
    store: redis.Redis, at_first: list[str]
) -> None:
    waiting(store, LOW, *at_first)
    waiting(store, QUEUE, "normal0")
    assert claimed(store, 1) == ["normal0"]
    passed_for(store, 60_000)
    assert claimed(store, 1) == ["low0"], "no other list holds jobs"
    waiting(store, LOW, *["low1"][: 2 - len(at_first)])
    waiting(store, QUEUE, "normal1", "normal2")
    assert claimed(store, 3, low_waits_ms=60_000) == ["normal1", "normal2", "low1"]


def urgent(store: redis.Redis, low_waits_ms: int) -> list[str]:
    """The job that a worker without room gets, when none with room has taken the ring."""
    store.lpush(keys.bell(f"{QUEUE}{queues.HIGH_SUFFIX}"), 1)
    high = (f"{QUEUE}{queues.HIGH_SUFFIX}",)
    found = claims.claim(
        store,
        ClaimRequest(("toy",), high, limit=1, worker="w@h", urgent=True),
        replace(TERMS, low_waits_at_most_ms=low_waits_ms),
    )
    return [claim.job_id for claim in found.claims]


def test_a_worker_without_room_gets_no_high_job_while_a_lower_one_is_due(
    store: redis.Redis,
) -> None:
    waiting(store, LOW, "low1", "low2")
    waiting(store, HIGH, *(f"high{n}" for n in range(9)))
    assert urgent(store, 60_000) == ["high0"]
    assert urgent(store, 60_000) == ["high1"]
    store.decrby(f"{keys.passed('toy')}{keys.FULL_SUFFIX}", 60_000)
    assert urgent(store, 60_000) == []
    assert claimed(store, 1, low_waits_ms=60_000) == ["low1"], "as soon as there is room"
    assert urgent(store, 60_000) == ["high2"]


@pytest.mark.parametrize("lower", [(LOW,), (QUEUE, LOW)], ids=["low", "two"])
def test_lower_jobs_that_are_served_keep_no_high_job_from_a_worker_without_room(
    store: redis.Redis, lower: tuple[str, ...]
) -> None:
    for list_key in lower:
        waiting(store, list_key, *(f"{list_key}{n}" for n in range(9)))
    waiting(store, HIGH, "high0")
    assert urgent(store, 60_000) == ["high0"]
    passed_by_urgent = f"{keys.passed('toy')}{keys.FULL_SUFFIX}"
    store.decrby(passed_by_urgent, 50_000)
    assert claimed(store, 1, low_waits_ms=60_000) == [f"{lower[0]}0"], "a place was free"
    waiting(store, HIGH, "high1")
    # The bound begins again, but for lists that got nothing.
    if store.exists(passed_by_urgent):
        store.decrby(passed_by_urgent, 20_000)
    assert urgent(store, 60_000) == ["high1"]
    if len(lower) == 2:
        passed_for(store, 60_000)
        assert claimed(store, 1, low_waits_ms=60_000) == [f"{LOW}0"]


def test_without_patience_a_worker_without_room_gets_high_jobs_if_no_lower_one_waits(
    store: redis.Redis,
) -> None:
    waiting(store, LOW, "low1")
    waiting(store, HIGH, "high1", "high2")
    assert urgent(store, 0) == []
    assert claimed(store, 1, low_waits_ms=0) == ["low1"]
    assert urgent(store, 0) == ["high1"]


def test_a_key_of_another_type_is_no_lower_job(store: redis.Redis) -> None:
    store.set(LOW, "no list")
    waiting(store, HIGH, "high1")
    assert urgent(store, 0) == ["high1"]


def test_a_large_claim_gives_lower_jobs_a_turn_too(store: redis.Redis) -> None:
    waiting(store, LOW, "low1")
    waiting(store, HIGH, *(f"high{n}" for n in range(60)))
    assert "low1" not in [claim.job_id for claim in take(store, limit=20)]
    assert take(store, limit=20)[0].job_id == "low1"


def test_a_claim_from_one_list_notes_nothing(store: redis.Redis) -> None:
    waiting(store, LOW, "low1", "low2")
    assert claimed(store, 1) == ["low1"]
    assert not store.exists(keys.passed("toy"))
