"""Which deaths count for a job, and which jobs run apart afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import redis

from llorch_worker.broker import claims, keys
from llorch_worker.broker.claims import Claim
from tests.broker.jobs import TERMS, push, take

DEAD_AT_ONCE = replace(TERMS, lease_ms=-1)
"""Leases that have lapsed when they begin: whoever claims is dead at the next sweep."""


def claim(store: redis.Redis, held: Sequence[Claim] = ()) -> list[Claim]:
    return take(store, DEAD_AT_ONCE, held=held)


def ids(taken: Sequence[Claim]) -> list[str]:
    return [claim.job_id for claim in taken]


def die(store: redis.Redis, taken: Sequence[Claim], *, progress: bool = True) -> None:
    for claim in taken:
        store.hset(keys.job(claim.job_id), "progress", int(progress))
    assert sorted(claims.sweep(store)) == sorted(ids(taken))


def test_a_job_alone_has_three_attempts(store: redis.Redis) -> None:
    push(store, "a")
    for attempt in (1, 2, 3):
        (only,) = taken = claim(store)
        assert only.attempt == attempt
        die(store, taken)
    assert claim(store) == []
    assert store.llen(keys.DEAD) == 1


def test_jobs_that_lose_two_workers_together_run_apart_from_then_on(store: redis.Redis) -> None:
    push(store, "a", "b", "c")
    die(store, claim(store))
    second = claim(store)
    assert [claim.attempt for claim in second] == [2, 2, 2]
    die(store, second)
    # One at a time, and this death did not count.
    (first,) = claim(store)
    assert (first.attempt, first.suspect) == (2, True)
    assert claim(store, held=[first]) == []
    (other,) = claim(store)
    die(store, [first, other])
    (third,) = claim(store)
    assert (third.attempt, third.suspect) == (2, True)


def test_progress_does_not_clear_a_suspect_that_lost_two_workers_in_company(
    store: redis.Redis,
) -> None:
    push(store, "a", "b")
    die(store, claim(store))
    die(store, claim(store))
    push(store, "c")
    first = claim(store)
    assert [(claim.job_id, claim.suspect) for claim in first][1:] == [("c", False)]
    die(store, first)
    # Its death came after some tokens, and it runs apart all the same; so does the other one.
    (second,) = claim(store)
    assert second.suspect
    store.hset(keys.job(second.job_id), "progress", 1)
    assert claim(store, held=[second]) == [], "c lost a worker already"
    claims.end(store, second, TERMS)
    (third,) = claim(store)
    assert {first[0].job_id, second.job_id} == {"a", "b"}
    assert (third.job_id, third.suspect) == (first[0].job_id, True)


def test_a_death_in_company_is_forgiven_once(store: redis.Redis) -> None:
    push(store, "a")
    die(store, claim(store))
    for attempt in (2, 2, 3):
        (only,) = taken = claim(store)
        assert only.attempt == attempt
        store.hset(keys.job("a"), "company", 1)
        die(store, taken)
    assert claim(store) == []


def test_a_job_without_progress_runs_apart_and_every_death_counts(store: redis.Redis) -> None:
    push(store, "poison", "good")
    taken = claim(store)
    store.hset(keys.job("good"), "progress", 1)
    claims.sweep(store)
    assert ids(taken) == ["poison", "good"]
    (poison,) = claim(store)
    assert (poison.job_id, poison.attempt, poison.suspect) == ("poison", 2, True)
    (good,) = claim(store)
    assert (good.job_id, good.attempt, good.suspect) == ("good", 2, False)
    assert claim(store, held=[good]) == []


def test_fresh_jobs_run_beside_a_suspect(store: redis.Redis) -> None:
    push(store, "poison")
    die(store, claim(store), progress=False)
    push(store, "fresh")
    assert ids(claim(store)) == ["poison", "fresh"]
