"""What sequences that begin alike compute once, in blocks of four tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llorch_worker.cache import BlockPool
from llorch_worker.engine.scheduler import Scheduler, StepPlan
from llorch_worker.engine.sequence import Sequence, SequenceState

MakeSequence = Callable[..., Sequence]

COMMON = list(range(20, 32))  # three blocks


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(40)


def scheduler(pool: BlockPool, sequences: int = 8, step: int = 64) -> Scheduler:
    return Scheduler(pool, block_size=4, max_sequences=sequences, max_step_tokens=step)


def plan_step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Computes the next step with token 1; (arrival, start, count) of each chunk."""
    plan = scheduler.schedule()
    compute(scheduler, plan)
    return [(chunk.sequence.arrival, chunk.start, chunk.count) for chunk in plan.chunks]


def compute(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.advance(plan)
    for chunk in plan.chunks:
        if chunk.sequence.pending == 0:
            chunk.sequence.append(1)
            if chunk.sequence.finish_reason is not None:
                scheduler.finish(chunk.sequence)
    scheduler.check_integrity()


def test_a_later_prompt_computes_only_what_is_new(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    s = scheduler(pool)
    first, second = make_sequence([*COMMON, 1, 2]), make_sequence([*COMMON, 3, 4, 5], arrival=1)
    s.add(first)
    assert plan_step(s) == [(0, 0, 14)]
    s.add(second)
    assert plan_step(s) == [(0, 14, 1), (1, 12, 3)]
    assert second.blocks[:3] == first.blocks[:3]
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert (s.blocks.hits_total, s.blocks.found_tokens_total) == (1, 12)


def test_the_last_token_is_always_computed(pool: BlockPool, make_sequence: MakeSequence) -> None:
    """And with it its block: a block that others read is never written to."""
    s = scheduler(pool)
    s.add(make_sequence(COMMON))
    plan_step(s)
    again = make_sequence(COMMON, arrival=1)
    s.add(again)
    assert plan_step(s) == [(0, 12, 1), (1, 8, 4)]
    assert again.cached_tokens == 8


def test_jobs_that_arrive_together_compute_what_they_share_once(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    s = scheduler(pool)
    for arrival in range(5):
        s.add(make_sequence([*COMMON, arrival, arrival], arrival=arrival, max_tokens=1))
    assert plan_step(s) == [(0, 0, 14)]
    assert plan_step(s) == [(arrival, 12, 2) for arrival in range(1, 5)]
    assert not s.has_work


def test_who_sits_out_leaves_the_step_to_others(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    """Two choices each of three requests: no request waits for another's."""
    s = scheduler(pool)
    for arrival in range(6):
        s.add(make_sequence([100 + arrival // 2] * 6, arrival=arrival))
    assert plan_step(s) == [(0, 0, 6), (2, 0, 6), (4, 0, 6)]
    assert plan_step(s) == [(0, 6, 1), (2, 6, 1), (4, 6, 1), (1, 4, 2), (3, 4, 2), (5, 4, 2)]


def test_followers_take_a_long_prefix_as_it_grows(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    s = scheduler(pool, step=8)
    s.add(make_sequence([*COMMON, *COMMON, 1]))
    s.add(make_sequence([*COMMON, *COMMON, 2], arrival=1))
    assert [plan_step(s) for _ in range(3)] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 8)]]
    assert plan_step(s) == [(0, 24, 1), (1, 24, 1)]


@pytest.mark.parametrize("end", ["finish", "preempt", "relieve"])
def test_where_the_leader_is_lost_the_next_one_leads(
    pool: BlockPool, make_sequence: MakeSequence, end: str
) -> None:
    s = scheduler(pool, step=8)
    leader = make_sequence([*COMMON, 1], priority="low")
    followers = [
        make_sequence([*COMMON, arrival], arrival=arrival, priority="low") for arrival in (2, 3)
    ]
    for sequence in (leader, *followers):
        s.add(sequence)
    assert plan_step(s) == [(0, 0, 8)]
    getattr(s, end)(leader)
    if leader.state is SequenceState.FINISHED:
        assert plan_step(s) == [(2, 8, 5)]
        assert plan_step(s) == [(2, 13, 1), (3, 12, 1)]
    else:
        assert plan_step(s) == [(0, 8, 5)]


def test_an_urgent_prompt_does_not_wait_for_a_lesser_one_that_leads(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    """It leads from then on, and the lesser one follows."""
    s = scheduler(pool, step=6)
    text = [*COMMON, *COMMON]
    s.add(make_sequence([*text, 1], priority="low"))
    plan_step(s)
    s.add(make_sequence([*text, 2], arrival=1, priority="high"))
    assert plan_step(s) == [(1, 4, 6)]
    assert plan_step(s) == [(1, 10, 6)]
    assert plan_step(s) == [(1, 16, 6)]
    assert plan_step(s) == [(1, 22, 3), (0, 6, 3)]


def test_a_step_that_failed_publishes_nothing(pool: BlockPool, make_sequence: MakeSequence) -> None:
    s = scheduler(pool)
    s.add(make_sequence([*COMMON, 1]))
    s.add(make_sequence([*COMMON, 2], arrival=1))
    failed = s.schedule()
    s.drop(failed)
    s.finish(failed.chunks[0].sequence)
    s.check_integrity()
    assert pool.kept_count == 0
    assert plan_step(s) == [(1, 0, 13)]


def test_blocks_of_a_step_that_failed_are_written_again(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    """Even where all that they should hold has been published by another meanwhile."""
    s = scheduler(pool, step=8)
    text = [*COMMON, *COMMON]
    s.add(make_sequence([*text, 1], arrival=1))
    s.drop(s.schedule())
    s.add(make_sequence([*text, 2]))
    for _ in range(3):
        plan_step(s)
    assert plan_step(s) == [(0, 24, 1), (1, 0, 7)]


def test_a_preempted_sequence_finds_its_own_blocks(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    s = scheduler(pool)
    sequence = make_sequence(6)
    s.add(sequence)
    for _ in range(4):
        plan_step(s)
    s.preempt(sequence)
    assert plan_step(s) == [(0, 8, 2)]
    assert sequence.cached_tokens == 0  # it had computed them itself
    assert s.blocks.found_tokens_total == 8


def test_a_resumed_sequence_finds_prompt_and_generated_tokens(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    s = scheduler(pool)
    s.add(make_sequence([7] * 6, max_tokens=6))
    while s.has_work:
        plan_step(s)
    resumed = make_sequence([7] * 6, generated=[1, 1, 1, 1], arrival=1)
    s.add(resumed)
    assert plan_step(s) == [(1, 8, 2)]
    assert resumed.cached_tokens == 6  # of the prompt


def test_what_is_shared_needs_no_free_block(make_sequence: MakeSequence) -> None:
    """Three times four blocks in a pool of eight, of which one for each that runs is spare."""
    s = scheduler(BlockPool(8))
    for arrival in range(3):
        s.add(make_sequence([*COMMON, arrival], arrival=arrival))
    plan_step(s)
    assert plan_step(s) == [(0, 13, 1), (1, 12, 1), (2, 12, 1)]


def test_what_was_used_longest_ago_makes_room_first(make_sequence: MakeSequence) -> None:
    pool = BlockPool(4)
    s = scheduler(pool)

    def run(token: int, arrival: int) -> list[tuple[int, int, int]]:
        s.add(make_sequence([token] * 5, arrival=arrival, max_tokens=1))
        return plan_step(s)

    for arrival, token in enumerate((5, 6, 7)):
        assert run(token, arrival) == [(arrival, 0, 5)]
    assert pool.kept_count == 3
    assert run(5, 3) == [(3, 4, 1)]
    assert run(8, 4) == [(4, 0, 5)]  # in place of 6
    assert run(5, 5) == [(5, 4, 1)]
    assert run(7, 6) == [(6, 4, 1)]
    assert run(6, 7) == [(7, 0, 5)]


def test_what_may_be_damaged_is_never_found_again(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    s = scheduler(pool)
    damaged, neighbour = make_sequence([*COMMON, 1]), make_sequence([*COMMON, 2], arrival=1)
    s.add(damaged)
    plan_step(s)
    s.add(neighbour)
    plan_step(s)
    s.blocks.distrust(damaged)
    s.finish(damaged)
    s.check_integrity()
    for _ in range(8):
        plan_step(s)  # the neighbour goes on, and publishes nothing
    s.add(make_sequence([*COMMON, 3], arrival=2, max_tokens=1))
    assert plan_step(s)[-1] == (2, 0, 13)
    s.finish(neighbour)
    assert pool.kept_count == 3


def test_without_prefix_caching_nothing_is_kept(
    pool: BlockPool, make_sequence: MakeSequence
) -> None:
    s = Scheduler(pool, block_size=4, max_sequences=8, max_step_tokens=64, prefix_caching=False)
    for arrival in range(2):
        s.add(make_sequence([*COMMON, 1], arrival=arrival, max_tokens=1))
    assert plan_step(s) == [(0, 0, 13), (1, 0, 13)]
    assert pool.kept_count == s.blocks.hits_total == 0
