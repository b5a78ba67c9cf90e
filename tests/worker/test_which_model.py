"""The rule that says which model a worker of several keeps, on a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from llorch_worker.broker.fleet.residents import Note
from llorch_worker.worker.which_model import (
    Change,
    Terms,
    Waiting,
    next_change,
    rotation_s,
)
from tests.worker.fleet_of_models import (
    TICK_S,
    Farsighted,
    Job,
    Policy,
    Simulation,
    fixed_to,
    zipf_arrivals,
)

TERMS = Terms(max_wait_s=60.0, min_resident_s=10.0, look_s=TICK_S)
LOADS = {"A": 5.0, "B": 5.0, "C": 5.0}
LONG_S = 1e6
JOBS_A_FLEET = 500


def keeper(name: str = "w", resident: str | None = "A", **told: object) -> Note:
    note = Note(worker=name, resident=resident, load_s=LOADS, kept_s=LONG_S)
    return note.model_copy(update=told)


def work(work_s: float, *, priority: str = "normal", **told: float) -> Waiting:
    return Waiting({priority: work_s}, **told)


def again(arrivals: Sequence[Job]) -> list[Job]:
    return [Job(job.model, job.came_s, job.left_s) for job in arrivals]


def test_single_jobs_of_three_models_cost_two_changes_after_the_first_load() -> None:
    arrivals = [Job(model, 0.01 * place, 1.0) for place, model in enumerate("ABCABC")]
    simulation = Simulation(arrivals, 1, LOADS, TERMS).run()
    assert simulation.changes == 2
    assert simulation.reasons == {"first": 1, "idle": 2}


@pytest.mark.parametrize("seed", range(20))
def test_no_model_waits_longer_for_a_worker_than_it_may_with_few_more_changes_than_needed(
    seed: int,
) -> None:
    chance = random.Random(seed)
    models, workers = "ABCDE"[: chance.randint(2, 5)], chance.randint(1, 3)
    load_s = {model: chance.uniform(1, 20) for model in models}
    least = Terms(max_wait_s=0.0, min_resident_s=chance.uniform(0, 10), look_s=TICK_S)
    rotation = rotation_s(len(models), workers, max(load_s.values()), least)
    terms = replace(least, max_wait_s=rotation * chance.uniform(1, 3) + 1)
    arrivals = zipf_arrivals(
        chance,
        models,
        JOBS_A_FLEET,
        load=chance.uniform(0.5, 1.3) * workers,
        favourite_s=chance.uniform(20, 300),
        mean_work_s=chance.choice([0.1, 1, 3]),
    )
    ours = Simulation(again(arrivals), workers, load_s, terms).run()
    assert ours.longest_unserved_s <= terms.max_wait_s + max(load_s.values()) + TICK_S
    knows = Simulation(again(arrivals), workers, load_s, terms, policy=Farsighted()).run()
    assert ours.changes <= 2 * knows.changes


@pytest.mark.parametrize("seed", range(8))
def test_seats_of_one_worker_never_keep_the_same_model_and_hold_the_same_bounds(seed: int) -> None:
    chance = random.Random(seed)
    models, workers = "ABCDE"[: chance.randint(3, 5)], chance.randint(1, 2)
    load_s = {model: chance.uniform(1, 20) for model in models}
    least = Terms(max_wait_s=0.0, min_resident_s=chance.uniform(0, 10), look_s=TICK_S)
    rotation = rotation_s(len(models), 2 * workers, max(load_s.values()), least)
    terms = replace(least, max_wait_s=rotation * chance.uniform(1, 3) + 1)
    arrivals = zipf_arrivals(
        chance,
        models,
        JOBS_A_FLEET,
        load=chance.uniform(0.5, 1.3) * 2 * workers,
        favourite_s=chance.uniform(20, 300),
    )
    ours = Simulation(arrivals, workers, load_s, terms, seats=2).run()
    assert len(ours.ended) == JOBS_A_FLEET
    assert ours.longest_unserved_s <= terms.max_wait_s + max(load_s.values()) + TICK_S


@pytest.mark.parametrize("load", [1.0, 1.5])
def test_workers_that_follow_the_favourite_end_nearly_all_jobs_where_no_fixed_pair_ends_70_percent(
    load: float,
) -> None:
    """A pair of three models never serves more than its share of the jobs: two thirds, which bounds
    the ratio by 1.5."""
    run_s = 1080.0  # each model is the favourite for as long
    arrivals = zipf_arrivals(
        random.Random(1), "ABC", round(run_s * load), load=load, favourite_s=120.0
    )

    def ended(policy: Policy | None) -> Simulation:
        return Simulation(again(arrivals), 2, LOADS, TERMS, policy=policy).run(run_s)

    ours, knows = ended(None), ended(Farsighted())
    best = max(len(ended(fixed_to(pair)).ended) for pair in ("AB", "AC", "BC", "AA", "BB", "CC"))
    came = sum(job.came_s < run_s for job in arrivals)
    assert len(ours.ended) > 0.95 * came
    assert len(ours.ended) > 1.4 * best
    assert waits_s(ours)[0.95] < waits_s(knows)[0.95] + 2 * LOADS["A"]


def waits_s(simulation: Simulation) -> dict[float, float]:
    waited = sorted((job.began_s or 0.0) - job.came_s for job in simulation.ended)
    return {share: waited[int(share * len(waited))] for share in (0.5, 0.95)}


def test_of_two_idle_workers_one_changes_for_one_job() -> None:
    fleet = [keeper("w1"), keeper("w2", "B")]
    change = next_change(fleet, {"C": work(1.0)}, TERMS)
    assert change == Change("w1", "C", "idle")
    loading = [keeper("w1", "C", kept_s=-4.0), keeper("w2", "B")]
    assert next_change(loading, {"C": work(1.0)}, TERMS) is None


def test_an_idle_worker_helps_with_a_backlog_that_outlasts_its_load() -> None:
    fleet = [keeper("w1"), keeper("w2", "B"), keeper("w3", "C")]
    assert next_change(fleet, {"A": work(9.0)}, TERMS) is None
    change = next_change(fleet, {"A": work(500.0)}, TERMS)
    assert change is not None
    assert (change.model, change.reason) == ("A", "idle")


@pytest.mark.parametrize(("waits_s", "changes"), [(29.0, False), (31.0, True)])
def test_a_busy_worker_changes_for_a_backlog_twice_as_large_as_its_own_and_a_load(
    waits_s: float, changes: bool
) -> None:
    found = next_change([keeper(left_s=10.0)], {"B": work(waits_s)}, TERMS)
    assert (found is not None) is changes
    if found is not None:
        assert found.reason == "backlog"
        assert found.patience_s == TERMS.max_wait_s


@pytest.mark.parametrize(("priority", "changes"), [("high", True), ("normal", False)])
def test_urgent_work_counts_four_times(priority: str, changes: bool) -> None:
    waiting = {"B": work(10.0, priority=priority)}
    assert bool(next_change([keeper(left_s=10.0)], waiting, TERMS)) is changes


def test_a_model_that_has_waited_long_enough_gets_the_busiest_worker() -> None:
    busy = [keeper(left_s=900.0)]
    assert next_change(busy, {"A": work(900.0), "B": work(0.1, unserved_s=50.0)}, TERMS) is None
    change = next_change(busy, {"A": work(900.0), "B": work(0.1, unserved_s=59.5)}, TERMS)
    assert change == Change("w", "B", "wait")
    assert change is not None
    assert change.patience_s == 0


@pytest.mark.parametrize(("waits_s", "changes"), [(70.0, True), (10.0, False)])
def test_a_model_that_nobody_free_can_load_holds_up_no_other(waits_s: float, changes: bool) -> None:
    """X waits for the first worker, which has just loaded; the second has not got it."""
    fleet = [
        keeper("w1", left_s=900.0, kept_s=5.0, load_s={"A": 5.0, "X": 5.0}),
        keeper("w2", "C", left_s=900.0, load_s={"B": 5.0, "C": 5.0}),
    ]
    waiting = {"A": work(900.0), "C": work(900.0), "X": work(0.1, unserved_s=100.0)}
    change = next_change(fleet, waiting | {"B": work(0.1, unserved_s=waits_s)}, TERMS)
    assert change == (Change("w2", "B", "wait") if changes else None)


def test_two_models_that_wait_for_one_worker_both_come_in_time() -> None:
    """The first begins so early that its load and its stay leave the second in time."""
    waiting = {"A": work(900.0)} | {model: work(0.1, unserved_s=46.0) for model in "BC"}
    assert next_change([keeper(left_s=900.0)], waiting, TERMS) == Change("w", "B", "wait")


def test_a_deadline_that_can_be_met_hurries_a_model_and_one_that_cannot_does_not() -> None:
    busy = [keeper(left_s=900.0)]
    can, cannot = work(0.1, slack_s=5.3), work(0.1, slack_s=4.0)
    assert next_change(busy, {"A": work(900.0), "B": can}, TERMS) == Change("w", "B", "wait")
    assert next_change(busy, {"A": work(900.0), "B": cannot}, TERMS) is None


def test_a_worker_that_is_pinned_or_has_just_loaded_keeps_its_model() -> None:
    late = {"B": work(900.0, unserved_s=600.0)}
    for told in ({"pinned": True}, {"kept_s": 9.0}, {"kept_s": -2.0}):
        assert next_change([keeper(**told)], late, TERMS) is None
    assert next_change([keeper(kept_s=10.0)], late, TERMS) is not None


def test_a_model_that_a_pinned_worker_keeps_has_no_turn_on_the_others() -> None:
    """C may come as well. That fits only if A need not come back."""
    loads = dict.fromkeys("ABC", 25.0)
    busy, pinned = keeper(left_s=900.0, load_s=loads), keeper("p", "A", load_s={}, pinned=True)
    waiting = {"A": work(900.0), "B": work(0.1, unserved_s=10.0)}
    assert next_change([busy], waiting, TERMS) == Change("w", "B", "wait")
    assert next_change([busy, pinned], waiting, TERMS) is None
    idle = keeper(kept_s=600.0, load_s=loads)
    assert next_change([idle, pinned], {"A": work(9.0)}, TERMS) is None
    # Two in turn can be served in time, three cannot: then models without jobs do not count.
    slow = keeper(load_s=dict.fromkeys("ABC", 45.0))
    other = keeper("q", "C", load_s={}, pinned=True)
    late = {"B": work(0.1)}
    assert next_change([slow, pinned, other], late, TERMS) == Change("w", "B", "idle")


def test_a_model_that_a_worker_cannot_load_is_left_to_others() -> None:
    fleet = [keeper("w1", load_s={"A": 5.0}), keeper("w2", "A", left_s=5.0)]
    assert next_change(fleet, {"B": work(90.0)}, TERMS) == Change("w2", "B", "backlog")
    assert next_change(fleet[:1], {"B": work(90.0)}, TERMS) is None


def test_a_long_prefix_cache_is_not_thrown_away_for_little_work() -> None:
    assert next_change([keeper(left_s=1.0, lost_s=30.0)], {"B": work(40.0)}, TERMS) is None
    assert next_change([keeper(left_s=1.0)], {"B": work(40.0)}, TERMS) is not None
