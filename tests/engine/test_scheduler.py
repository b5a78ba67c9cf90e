from __future__ import annotations

from collections.abc import Callable

import pytest

from llorch_worker.cache import BlockPool
from llorch_worker.engine.scheduler import Scheduler, StepPlan
from llorch_worker.engine.sequence import Sequence, SequenceState

MakeSequence = Callable[..., Sequence]


def scheduler(
    blocks: int = 100, sequences: int = 8, step: int = 64, *, prefix_caching: bool = False
) -> Scheduler:
    """Without prefix caching: what prompts have in common is test_prefix_sharing's matter."""
    return Scheduler(
        BlockPool(blocks),
        block_size=4,
        max_sequences=sequences,
        max_step_tokens=step,
        prefix_caching=prefix_caching,
    )


def run_step(scheduler: Scheduler) -> StepPlan:
    """Computes the next step with token 1 for every sequence that is due one."""
    plan = scheduler.schedule()
    scheduler.advance(plan)
    for chunk in plan.chunks:
        if chunk.sequence.pending == 0:
            chunk.sequence.append(1)
            if chunk.sequence.finish_reason is not None:
                scheduler.finish(chunk.sequence)
    scheduler.check_integrity()
    return plan


def counts(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.sequence.arrival, chunk.count) for chunk in plan.chunks]


def test_a_short_prompt_is_prefilled_in_one_step_and_then_decodes(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler()
    s.add(make_sequence(10, max_tokens=3))
    assert [counts(run_step(s)) for _ in range(3)] == [[(0, 10)], [(0, 1)], [(0, 1)]]
    assert not s.has_work


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget(make_sequence: MakeSequence) -> None:
    s = scheduler(step=8)
    s.add(make_sequence(20))
    assert [counts(run_step(s)) for _ in range(4)] == [[(0, 8)], [(0, 8)], [(0, 4)], [(0, 1)]]


def test_every_running_sequence_decodes_in_every_step_beside_a_long_prompt(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(step=8)
    for arrival in range(3):
        s.add(make_sequence(2, arrival=arrival))
    run_step(s)
    s.add(make_sequence(40, arrival=3))
    for _ in range(8):
        assert counts(run_step(s)) == [(0, 1), (1, 1), (2, 1), (3, 5)]
    assert counts(run_step(s)) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_no_step_exceeds_the_budget_even_when_it_is_smaller_than_max_sequences(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(sequences=8, step=3)
    for arrival in range(6):
        s.add(make_sequence(5, arrival=arrival, max_tokens=4))
    while s.has_work:
        plan = run_step(s)
        assert 1 <= plan.tokens <= 3
        assert s.running_count <= 3


def test_a_prefill_that_has_begun_is_never_left_without_a_token(
    make_sequence: MakeSequence,
) -> None:
    """Not even by as many decodes of higher priority as the budget has tokens."""
    s = scheduler(step=3)
    s.add(make_sequence(50, arrival=0, priority="low"))
    run_step(s)
    for arrival in range(1, 5):
        s.add(make_sequence(1, arrival=arrival, priority="high"))
    run_step(s)
    for _ in range(20):
        assert counts(run_step(s)) == [(1, 1), (2, 1), (0, 1)]


def test_the_last_token_of_a_prompt_finds_its_promised_block_when_no_other_is_free(
    make_sequence: MakeSequence,
) -> None:
    """Left over by chunks of the budget it is a decode, and must not preempt itself for ever."""
    s = scheduler(blocks=3, step=8)
    s.add(make_sequence(9, max_tokens=1))
    assert [counts(run_step(s)) for _ in range(2)] == [[(0, 8)], [(0, 1)]]
    assert s.preempted_total == 0
    assert not s.has_work


def test_admission_goes_by_priority_and_then_by_arrival(make_sequence: MakeSequence) -> None:
    s = scheduler(sequences=1)
    priorities = ["low", "normal", "high", "low", "high", "normal"]
    for arrival, priority in enumerate(priorities):
        s.add(make_sequence(2, arrival=arrival, priority=priority, max_tokens=1))
    admitted = []
    while s.has_work:
        admitted += [chunk.sequence.arrival for chunk in run_step(s).prefills]
    assert admitted == [2, 4, 1, 5, 0, 3]


def test_a_prompt_of_high_priority_prefills_before_a_low_one_that_has_begun(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(step=8)
    s.add(make_sequence(100, arrival=0, priority="low"))
    run_step(s)
    s.add(make_sequence(10, arrival=1, priority="high"))
    assert counts(run_step(s)) == [(1, 8)]
    assert counts(run_step(s)) == [(1, 2), (0, 6)]


def test_nobody_overtakes_the_head_of_the_queue_that_lacks_blocks(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(blocks=5)
    s.add(make_sequence(12, arrival=0, max_tokens=2))
    run_step(s)
    s.add(make_sequence(16, arrival=1))
    s.add(make_sequence(1, arrival=2))
    run_step(s)
    assert [sequence.arrival for sequence in s.waiting] == [1, 2]
    assert [chunk.sequence.arrival for chunk in run_step(s).prefills] == [1]


def test_when_blocks_run_out_the_latest_of_the_lowest_priority_yields(
    make_sequence: MakeSequence,
) -> None:
    # Blocks of 4 tokens: each prompt fills one, and the first decode of each needs another.
    s = scheduler(blocks=6)
    first = make_sequence(4, arrival=0, priority="normal")
    low = make_sequence(4, arrival=1, priority="low")
    later = make_sequence(4, arrival=2, priority="normal")
    for sequence in (first, low, later):
        s.add(sequence)
    run_step(s)
    assert s.running_count == 3
    while low.state is SequenceState.RUNNING:
        run_step(s)
    assert first.state is later.state is SequenceState.RUNNING
    assert low.blocks == []
    assert low.computed == 0
    while later.state is SequenceState.RUNNING:
        run_step(s)
    assert first.state is SequenceState.RUNNING
    assert s.preempted_total >= 2


def test_a_preempted_sequence_keeps_its_tokens_and_prefills_them_again(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler()
    sequence = make_sequence(6)
    s.add(sequence)
    for _ in range(3):
        run_step(s)
    s.preempt(sequence)
    assert sequence.generated_ids == [1, 1, 1]
    assert counts(run_step(s)) == [(0, 9)]
    assert sequence.generated_count == 4


def test_a_sequence_that_brings_generated_tokens_goes_on_after_them(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler()
    sequence = make_sequence(6, generated=[7, 8], max_tokens=4)
    s.add(sequence)
    assert counts(run_step(s)) == [(0, 8)]
    run_step(s)
    assert sequence.generated_ids == [7, 8, 1, 1]
    assert sequence.finish_reason == "length"


def test_after_relief_one_sequence_fewer_runs_until_another_has_finished(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler()
    short = make_sequence(4, arrival=0, max_tokens=3)
    large = make_sequence(8, arrival=2)
    for sequence in (short, make_sequence(4, arrival=1), large):
        s.add(sequence)
    run_step(s)
    s.relieve(large)
    run_step(s)
    assert large.state is SequenceState.WAITING
    run_step(s)
    assert short.finish_reason == "length"
    s.add(make_sequence(4, arrival=3))
    run_step(s)
    assert large.state is SequenceState.RUNNING
    assert s.running_count == 3


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_finished_sequence_frees_its_blocks_wherever_it_was(
    make_sequence: MakeSequence, steps: int
) -> None:
    """Waiting, in the middle of its prefill, and decoding."""
    pool = BlockPool(20)
    s = Scheduler(pool, block_size=4, max_sequences=4, max_step_tokens=8)
    sequence = make_sequence(20)
    s.add(sequence)
    for _ in range(steps):
        run_step(s)
    s.finish(sequence)
    s.finish(sequence)
    assert pool.free_count == 20
    assert not s.has_work
    assert sequence.state is SequenceState.FINISHED


def test_lost_and_doubly_held_blocks_are_told(make_sequence: MakeSequence) -> None:
    s = scheduler()
    sequence = make_sequence(10)
    s.add(sequence)
    run_step(s)
    sequence.blocks.append(sequence.blocks[0])
    with pytest.raises(RuntimeError, match="holds a KV block twice"):
        s.check_integrity()
    del sequence.blocks[-2:]
    with pytest.raises(RuntimeError, match="more or fewer holders"):
        s.check_integrity()


def test_integrity_check_finds_lost_reservations(make_sequence: MakeSequence) -> None:
    s = scheduler(step=4)
    sequence = make_sequence(10)
    s.add(sequence)
    run_step(s)
    assert sequence.reserved_blocks == 2
    sequence.reserved_blocks = 1
    with pytest.raises(RuntimeError, match="2 KV blocks are reserved, 1 of them"):
        s.check_integrity()


def decoding(s: Scheduler, *sequences: Sequence) -> StepPlan:
    """A step, not yet computed, in which ``sequences`` decode."""
    for sequence in sequences:
        s.add(sequence)
    run_step(s)
    return s.schedule()


def test_a_step_planned_ahead_is_one_token_further_for_those_who_go_on(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler()
    on, ends = make_sequence(3, max_tokens=9), make_sequence(5, arrival=1, max_tokens=2)
    ahead = s.schedule_ahead(decoding(s, on, ends))
    assert ahead is not None
    assert [(c.sequence, c.start, c.count, c.samples) for c in ahead.chunks] == [(on, 4, 1, True)]
    assert ahead.decodes == 1
    assert len(on.blocks) == 2  # for the token at 4


def test_a_step_is_not_planned_ahead_where_somebody_may_start_or_lacks_a_block(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(blocks=4, sequences=2)
    plan = decoding(s, make_sequence(6, max_tokens=3))
    s.add(make_sequence(2, arrival=1, priority="high"))
    assert s.schedule_ahead(plan) is None  # there are blocks and a place for it
    tight = scheduler(blocks=1)
    assert tight.schedule_ahead(decoding(tight, make_sequence(3, max_tokens=9))) is None


def test_a_step_is_not_planned_ahead_of_a_prefill_or_of_one_who_asks_for_more(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(step=4)
    s.add(make_sequence(6, max_tokens=9))
    assert s.schedule_ahead(s.schedule()) is None
    cut = scheduler()
    plan = decoding(
        cut, make_sequence(3, max_tokens=9), make_sequence(3, arrival=1, max_tokens=9, top_k=5)
    )
    assert cut.schedule_ahead(plan) is None


def test_blocks_of_who_ends_are_free_once_the_step_planned_ahead_has_landed(
    make_sequence: MakeSequence,
) -> None:
    s = scheduler(blocks=4)
    sequence = make_sequence(3, max_tokens=9)
    plan = decoding(s, sequence)
    ahead = s.schedule_ahead(plan)
    assert ahead is not None
    s.advance(plan)
    s.finish(sequence)
    s.check_integrity()
    assert not s.has_work
    assert len(sequence.blocks) == 2
    s.advance(ahead)
    s.check_integrity()
    assert sequence.blocks == []
