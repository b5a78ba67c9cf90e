"""Random arrivals, lengths, priorities, cancels and tiny pools: what the scheduler must keep."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from llorch_worker.cache import BlockPool
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.scheduler import Scheduler, StepPlan
from llorch_worker.engine.sequence import Sequence, SequenceState

BLOCK_SIZE = 4


class NoText:
    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        return False

    def close(self) -> bool:
        return False


class SchedulerPromises(RuleBasedStateMachine):
    """Submits, steps and cancels; the teardown drains and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []
        self.cancelled: set[Sequence] = set()

    @initialize(blocks=st.integers(2, 12), max_sequences=st.integers(1, 5), step=st.integers(1, 12))
    def open(self, blocks: int, max_sequences: int, step: int) -> None:
        self.pool = BlockPool(blocks)
        self.max_sequences, self.step_tokens = max_sequences, step
        self.scheduler = Scheduler(
            self.pool, block_size=BLOCK_SIZE, max_sequences=max_sequences, max_step_tokens=step
        )

    @rule(
        share=st.floats(0.05, 1),
        prompt_share=st.floats(0, 1),
        priority=st.sampled_from(["high", "normal", "low"]),
    )
    def submit(self, share: float, prompt_share: float, priority: Any) -> None:
        # Anything that the pool as a whole can hold is accepted.
        size = max(2, int(share * self.pool.total * BLOCK_SIZE))
        prompt = min(size - 1, max(1, int(prompt_share * size)))
        sequence = Sequence(
            [1] * prompt,
            GenerationRequest(prompt="x", max_tokens=size - prompt, priority=priority),
            seed=0,
            text=NoText(),  # type: ignore[arg-type]
            arrival=len(self.sequences),
        )
        self.sequences.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence.finish_reason is None:
            self.cancelled.add(sequence)
        self.scheduler.finish(sequence)
        assert sequence.blocks == []

    @precondition(lambda self: self.scheduler.running_count > 1)
    @rule()
    def run_out_of_device_memory(self) -> None:
        self.scheduler.relieve(self.scheduler.running[-1])

    @rule()
    def step(self) -> None:
        before = {s: (s.computed, s.generated_count) for s in self.scheduler.running}
        waiting = self.scheduler.waiting
        plan = self.scheduler.schedule()
        self.check_plan(plan, waiting, before)
        self.scheduler.advance(plan)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.pending == 0:
                sequence.append(1)
                if sequence.finish_reason is not None:
                    self.scheduler.finish(sequence)

    def check_plan(
        self, plan: StepPlan, waiting: tuple[Sequence, ...], before: dict[Sequence, Any]
    ) -> None:
        had_work = bool(waiting or before)
        assert bool(plan.chunks) == had_work  # no deadlock: where there is work, some is done
        assert plan.tokens <= self.step_tokens
        chunked = [chunk.sequence for chunk in plan.chunks]
        assert len(set(chunked)) == len(chunked)
        for chunk in plan.chunks:
            assert chunk.sequence.state is SequenceState.RUNNING
            assert chunk.start == chunk.sequence.computed
            assert len(chunk.sequence.blocks) * BLOCK_SIZE >= chunk.start + chunk.count
        # Each sequence that decoded and still runs has its token.
        for sequence in self.scheduler.running:
            if sequence.pending == 1:
                assert sequence in chunked
        # Who was admitted outranks everyone still waiting, but for those preempted just now.
        still = [s for s in self.scheduler.waiting if s in waiting]
        for admitted in plan.admitted:
            assert all(admitted.order < sequence.order for sequence in still)
        # Who lost its blocks is outranked by every sequence that ran and kept them.
        preempted = [s for s in before if s.state is SequenceState.WAITING]
        kept = [s for s in before if s.state is SequenceState.RUNNING]
        for victim in preempted:
            assert all(sequence.order < victim.order for sequence in kept)

    @invariant()
    def limits_hold_and_every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.running_count <= min(self.max_sequences, self.step_tokens)
        self.scheduler.check_integrity()
        live = {*self.scheduler.running, *self.scheduler.waiting}
        ended = {s for s in self.sequences if s.state is SequenceState.FINISHED}
        assert live | ended == set(self.sequences)
        assert not live & ended

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # No livelock: the first of those that run gains a token or a chunk in each step, and what
        # it has it never loses, so all of them together cannot take longer than one by one.
        tokens = sum(s.prompt_length + s.request.max_tokens for s in self.sequences)
        for _ in range(tokens + 1):
            if not self.scheduler.has_work:
                break
            self.step()
            self.limits_hold_and_every_block_is_accounted_for()
        assert not self.scheduler.has_work
        assert self.pool.free_count == self.pool.total
        for sequence in self.sequences:
            if sequence not in self.cancelled:
                assert sequence.finish_reason == "length"
                assert sequence.generated_count == sequence.request.max_tokens


SchedulerPromises.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestSchedulerPromises = SchedulerPromises.TestCase
