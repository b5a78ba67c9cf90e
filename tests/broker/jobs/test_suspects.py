"""Which deaths count for a job, and which jobs run apart afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import redis

from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim, ClaimTerms
from tests.broker.steps import TERMS, look, push, sweep, take
from tests.store import leases_in, letters_in, record_of, set_leases, waiting_ids, write_record

DEAD_AT_ONCE = replace(TERMS, lease_ms=-1)
"""Leases that have lapsed when they begin: whoever claims is dead at the next sweep."""
TWELVE = [f"j{number:02}" for number in range(12)]


def claim(
    store: redis.Redis, held: Sequence[Claim] = (), terms: ClaimTerms = DEAD_AT_ONCE
) -> list[Claim]:
    return take(store, terms, held=held, limit=16)


def ids(taken: Iterable[Claim]) -> list[str]:
    return [claim.job_id for claim in taken]


def make_progress(store: redis.Redis, taken: Iterable[Claim]) -> None:
    for claim in taken:
        write_record(store, claim.job_id, progress=1)


def blame(store: redis.Redis, *launched: Claim, max_attempts: int = 3) -> None:
    """The engine dies in a step of these jobs."""
    for claim in launched:
        alone = len(launched) == 1
        assert claims.blame(store, claim, max_attempts=max_attempts, alone=alone)


def die(store: redis.Redis, taken: Sequence[Claim]) -> None:
    """The worker dies."""
    assert sorted(sweep(store)) == sorted(ids(taken))


def test_a_job_that_kills_three_engines_without_progress_is_a_dead_letter(
    store: redis.Redis,
) -> None:
    push(store, "a")
    for attempt in (1, 2, 3):
        (only,) = claim(store)
        assert (only.attempt, only.suspect) == (attempt, attempt > 1)
        blame(store, only)
    assert claim(store) == []
    assert len(letters_in(store)) == 1


def test_a_workers_death_makes_no_suspect_and_counts_only_among_all_deaths(
    store: redis.Redis,
) -> None:
    push(store, "a", "b")
    for _ in range(18):
        taken = claim(store)
        assert [(each.job_id, each.suspect) for each in taken] == [("a", False), ("b", False)]
        die(store, taken)
    die(store, claim(store))
    for job_id in "ab":
        (last,) = claim(store)
        assert (last.job_id, last.suspect) == (job_id, True), "the last attempt is made alone"
        die(store, [last])
    assert claim(store) == []
    assert len(letters_in(store)) == 2


def test_a_suspect_whose_worker_dies_has_no_strike_more(store: redis.Redis) -> None:
    push(store, "a")
    blame(store, *claim(store))
    for _ in range(5):
        (again,) = taken = claim(store)
        assert again.suspect
        die(store, taken)
    assert record_of(store, "a")["strikes"] == "1"


def test_a_strike_after_progress_is_the_first(store: redis.Redis) -> None:
    push(store, "a")
    for attempt in range(1, 9):
        (only,) = claim(store)
        assert (only.attempt, only.suspect) == (attempt, attempt > 1)
        if attempt % 3 != 2:
            make_progress(store, [only])
        blame(store, only)
    assert claim(store)


def test_a_job_that_kills_after_some_progress_each_time_ends_after_twenty_deaths(
    store: redis.Redis,
) -> None:
    push(store, "a")
    for _ in range(20):
        (only,) = claim(store)
        make_progress(store, [only])
        blame(store, only)
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


def test_jobs_of_one_step_that_killed_its_engine_run_one_after_the_other(
    store: redis.Redis,
) -> None:
    push(store, *TWELVE)
    blame(store, *claim(store))
    held: list[Claim] = []
    for job_id in TWELVE:
        (suspect,) = claim(store, held)
        assert (suspect.job_id, suspect.suspect) == (job_id, True)
        assert claim(store, [*held, suspect]) == [], "it has made no progress"
        make_progress(store, [suspect])
        held.append(suspect)
    assert not waiting_ids(store)


def test_a_worker_asks_for_the_next_suspect_the_less_often_the_longer_one_runs(
    store: redis.Redis,
) -> None:
    push(store, "a", "b")
    blame(store, *take(store))
    found = look(store, limit=2)
    (first,) = found.claims
    assert found.look_again_s == 0.01
    for ran_s, least_s in ((0.2, 0.05), (60, 0.2)):
        write_record(store, "a", fence=first.fence - round(ran_s * 1e6))
        found = look(store, held=[first])
        assert found.claims == []
        assert found.look_again_s is not None
        assert least_s <= found.look_again_s <= 0.2


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_a_guilty_job_among_twelve_costs_three_engines_and_no_other_job(
    store: redis.Redis, max_attempts: int
) -> None:
    terms = replace(DEAD_AT_ONCE, max_attempts=max_attempts)
    push(store, *TWELVE)
    deaths = 0
    held: list[Claim] = []
    while taken := claim(store, held, terms):
        if "j07" in ids(taken):
            # The first step of the new jobs kills the engine. The others have made progress. A
            # suspect is in a step of its own.
            launched = [each for each in taken if each.suspect] or taken
            blame(store, *launched, max_attempts=max_attempts)
            others = {*held, *taken} - {*launched}
            assert all(claims.hand_back(store, each) for each in others)
            held, deaths = [], deaths + 1
        else:
            make_progress(store, taken)
            held += taken
    ended = {job_id for job_id in TWELVE if record_of(store, job_id).get("state") == "ended"}
    assert ended == {"j07"}
    assert sorted(ids(held)) == [job_id for job_id in TWELVE if job_id != "j07"]
    assert deaths == max(2, max_attempts), "the first is no proof"


def test_fresh_jobs_run_beside_a_suspect(store: redis.Redis) -> None:
    push(store, "poison")
    blame(store, *claim(store))
    push(store, "fresh")
    assert ids(claim(store)) == ["poison", "fresh"]


def test_a_suspect_that_a_drain_hands_back_stays_a_suspect(store: redis.Redis) -> None:
    push(store, "poison")
    blame(store, *claim(store))
    (suspect,) = claim(store)
    assert claims.hand_back(store, suspect)
    assert waiting_ids(store) == ["poison"]
    (again,) = claim(store)
    assert (again.suspect, again.attempt) == (True, 2)


def test_a_job_that_was_not_in_the_step_loses_no_attempt(store: redis.Redis) -> None:
    push(store, "launched", "waiting")
    launched, waiting = claim(store)
    blame(store, launched)
    assert claims.hand_back(store, waiting)
    found = {each.job_id: (each.attempt, each.suspect) for each in claim(store)}
    assert found == {"launched": (2, True), "waiting": (1, False)}
    assert "deaths" not in record_of(store, "waiting")


def test_a_blame_after_the_claim_was_lost_changes_nothing(store: redis.Redis) -> None:
    push(store, "a")
    (lost,) = taken = claim(store)
    die(store, taken)
    before = record_of(store, "a")
    assert not claims.blame(store, lost, max_attempts=3, alone=True)
    assert record_of(store, "a") == before


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
    blame(store, *claim(store))
    push(store, "b", "fresh")
    assert ids(claim(store)) == ["a", "fresh"]


def test_progress_before_a_drain_clears_earlier_deaths_too(store: redis.Redis) -> None:
    push(store, "a")
    blame(store, *claim(store))
    blame(store, *claim(store))
    (drained,) = claim(store)
    make_progress(store, [drained])
    assert claims.hand_back(store, drained)
    (again,) = claim(store)
    assert not again.suspect
    blame(store, again)
    assert claim(store), "it has one strike"
