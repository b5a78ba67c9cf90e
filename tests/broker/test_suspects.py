"""Which deaths count for a job, and which jobs run apart afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import redis

from llorch_worker.broker import claims, queues
from llorch_worker.broker.claims import Claim
from tests.broker.jobs import TERMS, push, sweep, take
from tests.store import leases_in, letters_in, record_of, set_leases, write_record

DEAD_AT_ONCE = replace(TERMS, lease_ms=-1)
"""Leases that have lapsed when they begin: whoever claims is dead at the next sweep."""
TWELVE = [f"j{number:02}" for number in range(12)]


def claim(store: redis.Redis, held: Sequence[Claim] = ()) -> list[Claim]:
    return take(store, DEAD_AT_ONCE, held=held, limit=16)


def ids(taken: Iterable[Claim]) -> list[str]:
    return [claim.job_id for claim in taken]


def make_progress(store: redis.Redis, taken: Iterable[Claim]) -> None:
    for claim in taken:
        write_record(store, claim.job_id, progress=1)


def die(store: redis.Redis, taken: Sequence[Claim]) -> None:
    assert sorted(sweep(store)) == sorted(ids(taken))


def test_a_job_alone_has_three_attempts_without_progress(store: redis.Redis) -> None:
    push(store, "a")
    for attempt in (1, 2, 3):
        (only,) = taken = claim(store)
        assert only.attempt == attempt
        die(store, taken)
    assert claim(store) == []
    assert len(letters_in(store)) == 1


def test_progress_clears_earlier_deaths(store: redis.Redis) -> None:
    push(store, "a")
    for attempt in range(1, 9):
        (only,) = taken = claim(store)
        assert (only.attempt, only.suspect) == (attempt, attempt % 3 == 0)
        if attempt % 3 != 2:
            make_progress(store, taken)
        die(store, taken)
    assert claim(store)


def test_a_job_that_kills_after_some_progress_each_time_ends_after_twenty_deaths(
    store: redis.Redis,
) -> None:
    push(store, "a")
    for attempt in range(1, 21):
        (only,) = taken = claim(store)
        assert only.suspect == (attempt == 20), "the last attempt of all is made alone"
        make_progress(store, taken)
        die(store, taken)
    assert claim(store) == []
    assert len(letters_in(store)) == 1


def test_progress_does_not_clear_a_job_in_its_last_attempt(store: redis.Redis) -> None:
    push(store, "a", "b")
    for _ in range(19):
        taken = claim(store)
        make_progress(store, taken)
        die(store, taken)
    (first,) = claim(store)
    make_progress(store, [first])
    assert claim(store, held=[first]) == []
    claims.end(store, first, TERMS)
    (second,) = claim(store)
    assert {first.job_id, second.job_id} == {"a", "b"}


def test_jobs_that_died_before_their_first_token_run_again_by_halves(store: redis.Redis) -> None:
    push(store, *TWELVE)
    die(store, claim(store))
    first = claim(store)
    assert ids(first) == TWELVE[:6]
    assert claim(store, held=first) == [], "none of them has made progress"
    make_progress(store, first)
    second = claim(store, held=first)
    assert ids(second) == TWELVE[6:]
    make_progress(store, second)
    assert claim(store, held=[*first, *second]) == []
    assert not store.llen(queues.suspects("toy"))


def test_a_guilty_job_among_twelve_ends_alone(store: redis.Redis) -> None:
    push(store, *TWELVE)
    ended: set[str] = set()
    deaths = 0
    held: list[Claim] = []
    while True:
        taken = claim(store, held)
        held += taken
        if "j07" in ids(taken):
            # It kills the worker before any job of this claim has made progress.
            die(store, held)
            held, deaths = [], deaths + 1
            continue
        if not taken:
            break
        make_progress(store, taken)
    ended |= {letter for letter in TWELVE if record_of(store, letter).get("state") == "ended"}
    assert ended == {"j07"}
    assert sorted(ids(held)) == [job_id for job_id in TWELVE if job_id != "j07"]
    assert deaths <= 5


def test_a_job_without_progress_is_a_suspect_and_one_with_progress_is_not(
    store: redis.Redis,
) -> None:
    push(store, "poison", "good")
    taken = claim(store)
    make_progress(store, taken[1:])
    die(store, taken)
    again = claim(store)
    assert [(claim.job_id, claim.suspect) for claim in again] == [("poison", True), ("good", False)]


def test_fresh_jobs_run_beside_a_suspect(store: redis.Redis) -> None:
    push(store, "poison")
    die(store, claim(store))
    push(store, "fresh")
    assert ids(claim(store)) == ["poison", "fresh"]


def test_a_suspect_that_a_drain_hands_back_stays_a_suspect(store: redis.Redis) -> None:
    push(store, "poison")
    die(store, claim(store))
    (suspect,) = claim(store)
    assert claims.hand_back(store, suspect)
    assert store.llen(queues.suspects("toy")) == 1
    (again,) = claim(store)
    assert (again.suspect, again.attempt) == (True, 2)


def test_a_lease_far_in_the_future_lapses_in_time_after_the_clock_was_set_back(
    store: redis.Redis,
) -> None:
    push(store, "a", "b")
    long = replace(TERMS, lease_ms=600_000)
    taken = [*take(store, limit=1), *take(store, long, limit=1)]
    leases = leases_in(store).items()
    for job_id, until_ms in leases:
        # As after TIME went back by two minutes.
        set_leases(store, {job_id: until_ms + 120_000})
    assert sweep(store) == []
    clamped = leases_in(store)
    before = dict(leases)
    for claim in taken:
        assert before[claim.job_id] <= clamped[claim.job_id] <= before[claim.job_id] + 60_000


def test_a_second_copy_of_a_suspects_message_holds_up_no_fresh_job(store: redis.Redis) -> None:
    push(store, "a", "b")
    die(store, claim(store))
    push(store, "b", "fresh")
    assert ids(claim(store)) == ["a", "fresh"]


def test_progress_before_a_drain_clears_earlier_deaths_too(store: redis.Redis) -> None:
    push(store, "a")
    die(store, claim(store))
    die(store, claim(store))
    (drained,) = claim(store)
    make_progress(store, [drained])
    assert claims.hand_back(store, drained)
    (again,) = claim(store)
    assert not again.suspect
    die(store, [again])
    assert claim(store), "it has died once in a row"


def test_a_death_beside_a_suspect_whose_lease_lapses_later_is_no_jobs_last(
    store: redis.Redis,
) -> None:
    push(store, *TWELVE[:4])
    die(store, claim(store))
    taken = take(store, DEAD_AT_ONCE, limit=1)
    assert take(store, held=taken, limit=1)
    die(store, taken)
    take(store, replace(DEAD_AT_ONCE, max_attempts=2))
    assert not letters_in(store), "the other may be to blame"
