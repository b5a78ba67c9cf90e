"""How many drafts pay."""

from __future__ import annotations

import random
from itertools import product
from statistics import geometric_mean

import pytest

from llorch_worker.engine.draft_planner import LEAST_GAIN, DraftPlanner, StepCosts
from llorch_worker.engine.drafter import Draft


def planner(seconds: dict[int, float], most_rows: int = 32) -> DraftPlanner:
    made = DraftPlanner(most_rows)
    made.costs = StepCosts(seconds)
    return made


def draft(*chances: float) -> Draft:
    return Draft([7] * len(chances), list(chances))


def test_drafts_of_one_sequence_do_not_slow_down_the_others_by_more_than_they_gain() -> None:
    """Four drafts of one of four sequences double the tokens of a step, which takes 1.8 times as
    long: more tokens per second, but three sequences would be much slower."""
    costs = {1: 1.0, 4: 1.0, 8: 1.8}
    sure = draft(1.0, 1.0, 1.0, 1.0)
    assert planner(costs).lengths(4, [sure, None, None, None], 32) == [0, 0, 0, 0]
    assert planner(costs).lengths(4, [draft(1.0) for _ in range(4)], 32) == [1, 1, 1, 1]


def test_the_plan_is_the_best_of_all() -> None:
    chance = random.Random(1)
    for _ in range(100):
        drafts = [
            draft(*sorted([chance.random() for _ in range(3)], reverse=True)) for _ in range(3)
        ]
        costs = planner({1: 1.0, 3: 1 + chance.random(), 12: 2 + 3 * chance.random()})
        most = chance.randint(1, 12)

        def speed(lengths: tuple[int, ...], drafts: list[Draft], costs: DraftPlanner) -> float:
            tokens = [1 + sum(d.chances[:n]) for d, n in zip(drafts, lengths, strict=True)]
            return geometric_mean(tokens) / costs.costs.of(3 + sum(lengths))

        plans = [each for each in product(range(4), repeat=3) if sum(each) <= most]
        best = max(speed(each, drafts, costs) for each in plans)
        got = costs.lengths(3, drafts, most)
        assert sum(got) <= most
        if any(got):
            assert speed(tuple(got), drafts, costs) == pytest.approx(best)
        else:
            assert best <= LEAST_GAIN * speed((0, 0, 0), drafts, costs) * (1 + 1e-9)


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0})
    for _ in range(200):
        costs.note(16, 4.0)
        costs.note(1, 1.0)
    assert costs.of(16) == pytest.approx(4.0, rel=0.2)
    assert costs.of(1) == pytest.approx(1.0, rel=0.2)


def test_a_machine_that_becomes_slower_changes_plans_little() -> None:
    """Steps of one size show it for all."""
    costs = StepCosts({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4, 16: 2.0})
    for _ in range(200):
        costs.note(1, 3.0)
    assert costs.of(16) / costs.of(1) == pytest.approx(2.0, rel=0.2)


def test_one_step_that_waited_counts_little() -> None:
    costs = StepCosts({1: 1.0, 8: 1.5})
    costs.note(8, 100.0)
    assert costs.of(8) < 1.5 * 1.3
