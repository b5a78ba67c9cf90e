"""Which deaths count for a job, and which jobs run apart afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
import redis

from llorch_worker.broker import claims, keys
from llorch_worker.broker.claims import Claim, ClaimTerms
from llorch_worker.broker.connection import connect
from llorch_worker.broker.queues import suspects
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.services import RedisServer

TERMS = ClaimTerms(lease_ms=-1, max_attempts=3, result_ttl_s=60, stream_ttl_s=60)
"""Leases that have lapsed when they begin: whoever claims is dead at the next sweep."""


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with connect(redis_server.url) as client:
        client.flushall()
        yield client


def push(store: redis.Redis, *job_ids: str) -> None:
    for job_id in job_ids:
        store.lpush(QUEUE, json.dumps(envelope(GOOD_BODY, headers={"id": job_id})))


def take(store: redis.Redis, held: Sequence[Claim] = ()) -> list[Claim]:
    return claims.claim(
        store,
        lists=[QUEUE],
        suspects=suspects("toy"),
        held=held,
        limit=10,
        worker="w",
        terms=TERMS,
    )


def ids(taken: Sequence[Claim]) -> list[str]:
    return [claim.job_id for claim in taken]


def die(store: redis.Redis, taken: Sequence[Claim], *, progress: bool = True) -> None:
    for claim in taken:
        store.hset(keys.job(claim.job_id), "progress", int(progress))
    assert sorted(claims.sweep(store)) == sorted(ids(taken))


def test_a_job_alone_has_three_attempts(store: redis.Redis) -> None:
    push(store, "a")
    for attempt in (1, 2, 3):
        (claim,) = taken = take(store)
        assert claim.attempt == attempt
        die(store, taken)
    assert take(store) == []
    assert store.llen(keys.DEAD) == 1


def test_jobs_that_lose_two_workers_together_run_apart_from_then_on(store: redis.Redis) -> None:
    push(store, "a", "b", "c")
    die(store, take(store))
    second = take(store)
    assert [claim.attempt for claim in second] == [2, 2, 2]
    die(store, second)
    # One at a time, and this death did not count.
    (first,) = take(store)
    assert (first.attempt, first.suspect) == (2, True)
    assert take(store, held=[first]) == []
    (other,) = take(store)
    die(store, [first, other])
    (third,) = take(store)
    assert (third.attempt, third.suspect) == (2, True)


def test_progress_does_not_clear_a_suspect_that_lost_two_workers_in_company(
    store: redis.Redis,
) -> None:
    push(store, "a", "b")
    die(store, take(store))
    die(store, take(store))
    push(store, "c")
    first = take(store)
    assert [(claim.job_id, claim.suspect) for claim in first][1:] == [("c", False)]
    die(store, first)
    # Its death came after some tokens, and it runs apart all the same; so does the other one.
    (second,) = take(store)
    assert second.suspect
    store.hset(keys.job(second.job_id), "progress", 1)
    assert take(store, held=[second]) == [], "c lost a worker already"
    claims.end(store, second, TERMS)
    (third,) = take(store)
    assert {first[0].job_id, second.job_id} == {"a", "b"}
    assert (third.job_id, third.suspect) == (first[0].job_id, True)


def test_a_death_in_company_is_forgiven_once(store: redis.Redis) -> None:
    push(store, "a")
    die(store, take(store))
    for attempt in (2, 2, 3):
        (claim,) = taken = take(store)
        assert claim.attempt == attempt
        store.hset(keys.job("a"), "company", 1)
        die(store, taken)
    assert take(store) == []


def test_a_job_without_progress_runs_apart_and_every_death_counts(store: redis.Redis) -> None:
    push(store, "poison", "good")
    taken = take(store)
    store.hset(keys.job("good"), "progress", 1)
    claims.sweep(store)
    assert ids(taken) == ["poison", "good"]
    (poison,) = take(store)
    assert (poison.job_id, poison.attempt, poison.suspect) == ("poison", 2, True)
    (good,) = take(store)
    assert (good.job_id, good.attempt, good.suspect) == ("good", 2, False)
    assert take(store, held=[good]) == []


def test_fresh_jobs_run_beside_a_suspect(store: redis.Redis) -> None:
    push(store, "poison")
    die(store, take(store), progress=False)
    push(store, "fresh")
    assert ids(take(store)) == ["poison", "fresh"]
