"""Whose place a high job takes, what that costs the other, and how long the other can lose it.

The invariants of all steps are in test_scheduler_promises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from llorch_worker.cache import BlockPool
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine.device.queue import DeviceQueue
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import Sequence, SequenceState
from tests.engine.test_scheduler import plan_step
from tests.waiting import wait_until

MakeSequence = Callable[..., Sequence]
WAITS_AT_MOST_S = 60.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler(clock: Clock) -> Callable[..., Scheduler]:
    def make(sequences: int = 2, blocks: int = 100) -> Scheduler:
        return Scheduler(
            BlockPool(blocks),
            block_size=4,
            max_sequences=sequences,
            max_step_tokens=64,
            low_waits_at_most_s=WAITS_AT_MOST_S,
            clock=clock,
        )

    return make


def step(scheduler: Scheduler) -> list[int]:
    """Computes the next step; the arrivals of those that took part."""
    return [arrival for arrival, _, _ in plan_step(scheduler)]


def test_a_high_sequence_takes_the_place_of_the_least_urgent(
    make_sequence: MakeSequence, scheduler: Callable[..., Scheduler]
) -> None:
    s = scheduler(sequences=3)
    for arrival, priority in enumerate(("low", "normal", "low")):
        s.add(make_sequence(4, arrival=arrival, priority=priority))
    step(s)
    s.add(make_sequence(4, arrival=3, priority="high"))
    assert step(s) == [1, 0, 3]
    s.add(make_sequence(4, arrival=4, priority="high"))
    assert step(s) == [3, 1, 4]
    assert [sequence.arrival for sequence in s.waiting] == [0, 2]


def test_a_preempted_sequence_goes_on_by_itself_from_the_blocks_it_left(
    make_sequence: MakeSequence, scheduler: Callable[..., Scheduler]
) -> None:
    s = scheduler(sequences=1)
    low = make_sequence(12, arrival=0, priority="low", max_tokens=8)
    s.add(low)
    step(s)
    step(s)
    said = list(low.token_ids)
    s.add(make_sequence(list(range(50, 54)), arrival=1, priority="high", max_tokens=2))
    assert [step(s), step(s)] == [[1], [1]]
    assert (low.token_ids, low.computed) == (said, 0)
    plan = s.schedule()
    # Of 14 known tokens, 12 lie in full blocks.
    assert [(chunk.sequence, chunk.start, chunk.count) for chunk in plan.chunks] == [(low, 12, 2)]
    s.advance(plan)
    assert low.cached_tokens == 0  # it computed them itself


def test_a_high_sequence_preempts_as_many_as_its_blocks_take_or_none(
    make_sequence: MakeSequence, scheduler: Callable[..., Scheduler]
) -> None:
    def filled(*sizes: int) -> Scheduler:
        s = scheduler(sequences=8, blocks=12)
        s.add(make_sequence(list(range(100, 108)), arrival=0, priority="high"))
        for arrival, size in enumerate(sizes, 1):
            ids = list(range(200 * arrival, 200 * arrival + size))
            s.add(make_sequence(ids, arrival=arrival, priority="low"))
        step(s)
        return s

    s = filled(8, 8)
    s.add(make_sequence(28, arrival=9, priority="high"))
    assert step(s) == [0, 9]
    s = filled(8)
    s.add(make_sequence(44, arrival=9, priority="high"))
    assert step(s) == [0, 1]


def test_a_low_sequence_under_endless_high_ones_starts_within_its_bound(
    make_sequence: MakeSequence, scheduler: Callable[..., Scheduler], clock: Clock
) -> None:
    s = scheduler(sequences=2)
    low = make_sequence(4, arrival=0, priority="low", max_tokens=30)
    s.add(low)
    arrival = 0
    high_tokens = 3
    while low.state is SequenceState.WAITING or clock.now_s == 0:
        while len(s.waiting) < 6:
            arrival += 1
            s.add(make_sequence(4, arrival=arrival, priority="high", max_tokens=high_tokens))
        step(s)
        clock.now_s += 1
        assert clock.now_s <= WAITS_AT_MOST_S + high_tokens + 1
    assert clock.now_s >= WAITS_AT_MOST_S
    # Nor is it preempted from now on, however many more come.
    steps = 0
    while low.state is SequenceState.RUNNING:
        arrival += 1
        s.add(make_sequence(4, arrival=arrival, priority="high", max_tokens=high_tokens))
        assert 0 in step(s)
        steps += 1
    assert steps == 29


def test_a_sequence_that_is_preempted_again_and_again_ages_by_all_its_waits(
    make_sequence: MakeSequence, scheduler: Callable[..., Scheduler], clock: Clock
) -> None:
    s = scheduler(sequences=1)
    s.add(make_sequence(4, arrival=0, priority="low", max_tokens=200))
    step(s)
    for arrival in range(1, 20):
        s.add(make_sequence(4, arrival=arrival, priority="high", max_tokens=2))
        step(s)
        clock.now_s += 20
        step(s)
        step(s)
    assert s.preempted_total == 3


def test_a_prefill_that_is_preempted_again_and_again_ages_by_its_lost_time_too(
    make_sequence: MakeSequence, scheduler: Callable[..., Scheduler], clock: Clock
) -> None:
    s = scheduler(sequences=1, blocks=60)
    low = make_sequence(200, arrival=0, priority="low", max_tokens=4)
    s.add(low)
    arrival = 0
    while low.generated_count == 0:
        # Its four steps of prefill never fit between two high jobs, which evict its blocks.
        for _ in range(2):
            step(s)
            clock.now_s += 0.45
        arrival += 1
        ids = list(range(1000 * arrival, 1000 * arrival + 220))
        s.add(make_sequence(ids, arrival=arrival, priority="high", max_tokens=1))
        while any(sequence.asks_for_high for sequence in (*s.waiting, *s.running)):
            step(s)
        clock.now_s += 0.1
        assert clock.now_s < WAITS_AT_MOST_S + 10


def test_a_high_sequence_passes_an_aged_one_only_in_the_place_of_a_lower(
    make_sequence: MakeSequence, scheduler: Callable[..., Scheduler], clock: Clock
) -> None:
    s = scheduler(sequences=2)
    s.add(make_sequence(4, arrival=0, priority="normal", max_tokens=50))
    s.add(make_sequence(4, arrival=1, priority="normal", max_tokens=50))
    s.add(make_sequence(4, arrival=2, priority="low"))
    step(s)
    clock.now_s += WAITS_AT_MOST_S
    step(s)
    s.add(make_sequence(4, arrival=3, priority="high", max_tokens=2))
    assert step(s) == [0, 3]
    step(s)
    # The place that is free now goes to the aged one.
    s.add(make_sequence(4, arrival=4, priority="high", max_tokens=2))
    assert set(step(s)) == {2, 4}


def test_a_high_job_has_its_first_token_within_three_steps_and_its_prefill(
    make_engine: Callable[..., Engine], loaded: Any, watched: Any, gate: Any
) -> None:
    first, held = gate(at=1), gate(at=6)
    model = watched(lambda *step: (first(*step), held(*step)))
    engine = make_engine(model=model, max_sequences=4, max_step_tokens=16)

    def request(**fields: Any) -> GenerationRequest:
        return GenerationRequest(temperature=0, ignore_eos=True, **fields)

    low = [
        engine.submit(request(prompt=f"Once {n}", max_tokens=120, priority="low")) for n in range(4)
    ]
    first.open()
    held.wait_until_reached()
    prompt = list(range(300, 340))
    first_token_at: list[int] = []
    high = engine.submit(
        request(prompt_token_ids=prompt, max_tokens=2, priority="high"),
        on_event=lambda event: (
            first_token_at.append(len(model.steps)) if event.type == "tokens" else None
        ),
    )
    held.open()
    high.result(60)
    # 3 others decode beside it, so a step has 13 tokens of the budget for its 40: 4 steps.
    assert first_token_at[0] - 6 <= 3 + 4
    assert engine.stats().preempted_total == 1
    texts = [generation.result(60).choices[0].token_ids for generation in low]
    with loaded.engine(max_sequences=1) as alone:
        for n, ids in enumerate(texts):
            same = request(prompt=f"Once {n}", max_tokens=120)
            assert alone.submit(same).result(60).choices[0].token_ids == ids


def test_tokens_that_grammars_force_leave_the_budget_to_a_more_urgent_prefill(
    make_engine: Callable[..., Engine],
    make_queue: Callable[[], DeviceQueue],
    watched: Any,
    gate: Any,
) -> None:
    first, held = gate(at=1), gate(at=9)
    model = watched(lambda *step: (first(*step), held(*step)))
    engine = make_engine(model=model, max_sequences=4, max_step_tokens=16)
    pattern = "([a-d]" + "the cat sat on the mat and then it went home again " * 3 + "){9}"
    low = [
        engine.submit(
            GenerationRequest(
                prompt="a",
                max_tokens=400,
                priority="low",
                seed=seed,
                structured_outputs={"regex": pattern},
            )
        )
        for seed in range(3)
    ]
    first.open()
    held.wait_until_reached()
    first_token_at: list[int] = []
    high = engine.submit(
        GenerationRequest(
            prompt_token_ids=list(range(300, 320)),
            max_tokens=2,
            priority="high",
            # Its first token has text: half a character would come with the next.
            temperature=0,
            ignore_eos=True,
        ),
        on_event=lambda event: (
            first_token_at.append(len(model.steps)) if event.type == "tokens" else None
        ),
    )
    held.open()
    high.result(60)
    for generation in low:
        generation.cancel()
    assert max(map(max, model.steps[:9])) > 4, "the low jobs have many forced tokens"
    # 3 others decode beside it, so a step has 13 tokens of the budget for its 20: 2 steps, after
    # that which may have been planned ahead.
    assert first_token_at[0] - 9 <= 2 + make_queue().overlaps


def test_a_preempted_job_still_obeys_its_deadline_and_its_cancel(
    make_engine: Callable[..., Engine], watched: Any, gate: Any
) -> None:
    first, held, later = gate(at=1), gate(at=3), gate(at=6)
    model = watched(lambda *step: (first(*step), held(*step), later(*step)))
    engine = make_engine(model=model, max_sequences=2)

    def request(**fields: Any) -> GenerationRequest:
        return GenerationRequest(prompt="Once", temperature=0, ignore_eos=True, **fields)

    cancelled = engine.submit(request(max_tokens=200, priority="low"))
    late = engine.submit(request(max_tokens=200, priority="low", deadline_s=2))
    due_s = time.monotonic() + 2
    first.open()
    held.wait_until_reached()
    high = [engine.submit(request(max_tokens=50, priority="high")) for _ in range(2)]
    held.open()
    later.wait_until_reached()
    assert [s.request.priority for s in engine._scheduler.waiting] == ["low", "low"]
    cancelled.cancel()
    wait_until(lambda: time.monotonic() > due_s)
    later.open()
    assert late.result(60).choices[0].finish_reason == "deadline"
    with pytest.raises(Exception, match="cancelled"):
        cancelled.result(60)
    assert [job.result(60).usage.completion for job in high] == [50, 50]
