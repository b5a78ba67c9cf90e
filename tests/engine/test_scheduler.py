"""Who runs in a step, what is computed once, and when a step can be planned ahead.

The invariants of all steps are in test_scheduler_promises.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llorch_worker.cache import BlockPool
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import Sequence, SequenceState
from llorch_worker.engine.step_plan import StepPlan

MakeSequence = Callable[..., Sequence]

COMMON = list(range(20, 32))  # three blocks


def scheduler(
    blocks: int = 40, sequences: int = 8, step: int = 64, *, prefix_caching: bool = True
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks),
        block_size=4,
        max_sequences=sequences,
        max_step_tokens=step,
        prefix_caching=prefix_caching,
    )


def plan_step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Computes the next step with token 1; (arrival, start, count) of each chunk."""
    plan = scheduler.schedule()
    scheduler.advance(plan)
    for chunk in plan.chunks:
        if chunk.sequence.pending == 0:
            chunk.sequence.append(1)
            if chunk.sequence.finish_reason is not None:
                scheduler.finish(chunk.sequence)
    scheduler.check_integrity()
    return [(chunk.sequence.arrival, chunk.start, chunk.count) for chunk in plan.chunks]


def test_a_running_prefill_gets_a_token_in_every_step(
    make_sequence: MakeSequence,
) -> None:
    """Even beside as many decodes of higher priority as the budget has tokens."""
    s = scheduler(step=3, prefix_caching=False)
    s.add(make_sequence(50, arrival=0, priority="low"))
    plan_step(s)
    for arrival in range(1, 5):
        s.add(make_sequence(1, arrival=arrival, priority="normal"))
    plan_step(s)
    for _ in range(20):
        assert [(arrival, count) for arrival, _, count in plan_step(s)] == [(1, 1), (2, 1), (0, 1)]


def test_after_relief_one_sequence_fewer_runs_until_another_has_finished(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler()
    short = make_sequence(4, arrival=0, max_tokens=3)
    large = make_sequence(8, arrival=2)
    for sequence in (short, make_sequence(4, arrival=1), large):
        s.add(sequence)
    plan_step(s)
    s.relieve(large)
    plan_step(s)
    assert large.state is SequenceState.WAITING
    plan_step(s)
    assert short.finish_reason == "length"
    s.add(make_sequence(4, arrival=3))
    plan_step(s)
    assert large.state is SequenceState.RUNNING
    assert len(s.running) == 3


def test_the_integrity_check_finds_lost_and_doubly_held_blocks(make_sequence: MakeSequence) -> None:
    s = scheduler()
    sequence = make_sequence(10)
    s.add(sequence)
    plan_step(s)
    sequence.blocks.append(sequence.blocks[0])
    with pytest.raises(RuntimeError, match="holds a KV block twice"):
        s.check_integrity()
    del sequence.blocks[-2:]
    with pytest.raises(RuntimeError, match="more or fewer holders"):
        s.check_integrity()


def ahead(s: Scheduler, plan: StepPlan) -> list[tuple[int, int, int]]:
    """The step after ``plan``, which was launched, as of :func:`plan_step`."""
    following = s.schedule_ahead(plan)
    assert following is not None
    return [(chunk.sequence.arrival, chunk.start, chunk.count) for chunk in following.chunks]


def test_prefills_and_decodes_are_planned_ahead_and_jobs_start_ahead(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(step=4, prefix_caching=False)
    s.add(make_sequence(6, max_tokens=9))
    assert ahead(s, s.schedule()) == [(0, 4, 2)]
    s = scheduler(step=4, prefix_caching=False)
    for arrival in range(2):
        s.add(make_sequence(3, arrival=arrival, max_tokens=9))
    plan = s.schedule()
    s.add(make_sequence(1, arrival=2, max_tokens=1))
    # A token of the first whose id is unknown, the rest of the second's prompt, the third's.
    assert ahead(s, plan) == [(0, 3, 1), (1, 1, 2), (2, 0, 1)]


def test_who_ends_with_the_launched_step_is_not_planned_ahead(make_sequence: MakeSequence) -> None:
    s = scheduler(prefix_caching=False)
    s.add(make_sequence(3, arrival=0, max_tokens=1))
    assert s.schedule_ahead(s.schedule()) is None


def test_no_step_is_planned_ahead_of_blocks_that_a_prefill_will_find(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler()
    s.add(make_sequence([*COMMON, 1], arrival=0))
    plan = s.schedule()
    s.add(make_sequence([*COMMON, 2], arrival=1))
    assert s.schedule_ahead(plan) is None
    s.advance(plan)
    plan.chunks[0].sequence.append(1)
    assert plan_step(s) == [(0, 13, 1), (1, 12, 1)]


def test_no_step_is_planned_ahead_if_a_decode_then_lacks_a_block(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(blocks=2, prefix_caching=False)
    s.add(make_sequence(4, arrival=0))
    plan_step(s)
    s.add(make_sequence(3, arrival=1))
    assert s.schedule_ahead(s.schedule()) is not None
    s = scheduler(blocks=1, prefix_caching=False)
    s.add(make_sequence(4, arrival=0))
    assert s.schedule_ahead(s.schedule()) is None


def test_a_suspect_computes_in_steps_of_its_own_until_its_first_token(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(step=4, prefix_caching=False)
    s.add(make_sequence(2, arrival=0))
    plan_step(s)
    suspect = make_sequence(10, arrival=1)
    suspect.suspect = True
    s.add(suspect)
    s.add(make_sequence(3, arrival=2))
    assert plan_step(s) == [(1, 0, 4)]
    assert plan_step(s) == [(0, 2, 1), (2, 0, 3)]
    assert plan_step(s) == [(1, 4, 4)]
    assert plan_step(s) == [(0, 3, 1), (2, 3, 1)]
    assert plan_step(s) == [(1, 8, 2)]
    assert plan_step(s) == [(0, 4, 1), (1, 10, 1), (2, 4, 1)]


def test_the_choices_of_a_suspect_share_its_steps_and_two_suspects_never_do(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(prefix_caching=False)
    for arrival, choice in ((0, 0), (0, 1), (1, 0)):
        sequence = make_sequence(5, arrival=arrival)
        sequence.choice, sequence.suspect = choice, True
        s.add(sequence)
    assert plan_step(s) == [(0, 0, 5), (0, 0, 5)]
    assert plan_step(s) == [(0, 5, 1), (0, 5, 1)]
    assert plan_step(s) == [(1, 0, 5)]
    assert plan_step(s) == [(0, 6, 1), (0, 6, 1), (1, 5, 1)]


def test_no_step_is_planned_ahead_of_a_suspects_or_after_it(make_sequence: MakeSequence) -> None:
    s = scheduler(step=4)
    s.add(make_sequence(2, arrival=0, max_tokens=9))
    plan_step(s)
    plan = s.schedule()
    suspect = make_sequence(6, arrival=1, max_tokens=9)
    suspect.suspect = True
    s.add(suspect)
    assert s.schedule_ahead(plan) is None
    s.advance(plan)
    plan.chunks[0].sequence.append(1)
    plan = s.schedule()
    assert [chunk.sequence for chunk in plan.chunks] == [suspect]
    assert s.schedule_ahead(plan) is None


def test_a_suspect_runs_on_where_the_only_other_one_gives_up_its_blocks(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(blocks=5, step=2, prefix_caching=False)
    s.add(make_sequence(4, arrival=1))
    plan_step(s)
    plan_step(s)
    suspect = make_sequence(12, arrival=0, max_tokens=1)
    suspect.suspect = True
    s.add(suspect)
    assert [plan_step(s)[0][0] for _ in range(11)] == [0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1]
    assert suspect.finish_reason == "length"


def test_a_prefill_that_sits_out_leaves_the_step_to_others(
    make_sequence: MakeSequence,
) -> None:
    """Two choices each of three requests: no request waits for another's."""
    s = scheduler()
    for arrival in range(6):
        s.add(make_sequence([100 + arrival // 2] * 6, arrival=arrival))
    assert plan_step(s) == [(0, 0, 6), (2, 0, 6), (4, 0, 6)]
    assert plan_step(s) == [(0, 6, 1), (2, 6, 1), (4, 6, 1), (1, 4, 2), (3, 4, 2), (5, 4, 2)]


def test_a_prompt_never_waits_for_one_of_lower_priority(
    make_sequence: MakeSequence,
) -> None:
    """It computes the common part from then on, and the other takes it."""
    s = scheduler(step=6)
    text = [*COMMON, *COMMON]
    s.add(make_sequence([*text, 1], priority="low"))
    plan_step(s)
    s.add(make_sequence([*text, 2], arrival=1, priority="high"))
    assert plan_step(s) == [(1, 4, 6)]
    assert plan_step(s) == [(1, 10, 6)]
    assert plan_step(s) == [(1, 16, 6)]
    assert plan_step(s) == [(1, 22, 3), (0, 6, 3)]


def test_a_high_job_that_takes_a_place_leaves_an_urgent_prefill_the_blocks_reserved_for_it(
    make_sequence: MakeSequence,
) -> None:
    """It is admitted by what it shares with that, which it must hold at once."""
    s = scheduler(blocks=100, sequences=2)
    common = [2 + token % 17 for token in range(128)]
    s.add(make_sequence(10, arrival=0, priority="low"))
    plan_step(s)
    s.add(make_sequence([*common, *([1] * 72)], arrival=1, priority="high"))
    for _ in range(3):
        plan_step(s)
    s.add(make_sequence([*common, *([2] * 80)], arrival=2, priority="high"))
    while {1, 2} - {arrival for arrival, *_ in plan_step(s)}:
        pass
