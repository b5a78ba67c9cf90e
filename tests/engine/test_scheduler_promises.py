"""What the scheduler must keep under random arrivals, priorities, cancels, drafts, tokens that a
grammar forces, and tiny pools.

Most prompts begin alike. A model of the KV memory notes for every slot the text up to the token
written there, in the layers that keep all tokens and in those of each window; every reader must
find its own text. A step launched ahead writes when it ends, after all that happened meanwhile.
"""

from __future__ import annotations

from itertools import chain, takewhile
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from llorch_worker.cache import BlockPool, CacheShape, WindowPool
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine.draft_planner import DraftPlanner, StepCosts
from llorch_worker.engine.drafter import Draft, Drafter
from llorch_worker.engine.scheduler import Scheduler
from llorch_worker.engine.sequence import HIGH_RANK, Sequence, SequenceState
from llorch_worker.engine.step_plan import Chunk, StepPlan
from tests.engine.conftest import NoText
from tests.sizes import sized

BLOCK_SIZE = 4
GARBAGE = (-1,)
TOKEN, WRONG = 1, 2
"""What each step chooses, and drafts that do not hold."""

Slot = tuple[int, int, int]
"""Group of layers, block, offset."""


class SomeHold(Drafter):
    """Drafts of which the first ``right`` hold."""

    def __init__(self, right: int, count: int) -> None:
        self._token_ids = [TOKEN] * right + [WRONG] * (count - right)

    def propose(self, token_ids: list[int], most: int) -> Draft | None:
        drafts = self._token_ids[:most]
        return Draft(drafts, [1.0] * len(drafts)) if drafts else None


class SchedulerPromises(RuleBasedStateMachine):
    """Submits, steps, failures and cancels; the teardown drains and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []
        self.ended_early: set[Sequence] = set()
        self.memory: dict[Slot, tuple[int, ...]] = {}
        """What each slot holds: all token ids up to the one whose keys lie there."""
        self.ahead: StepPlan | None = None
        self.written: dict[Sequence, list[Slot]] = {}
        """The slots that ``ahead`` writes to for each sequence."""

    @initialize(
        blocks=st.integers(2, 12) | st.integers(13, 50),
        max_sequences=st.integers(1, 2) | st.integers(3, 5),
        step=st.integers(1, 24),
        prefix_caching=st.sampled_from([True, True, True, False]),
        overlaps=st.booleans(),
        windows=st.sets(st.integers(1, 12), max_size=2),
        drafts=st.sampled_from([0, 2, 20]),
    )
    def open(
        self,
        blocks: int,
        max_sequences: int,
        step: int,
        prefix_caching: bool,
        overlaps: bool,
        windows: set[int],
        drafts: int,
    ) -> None:
        self.overlaps = overlaps
        self.pool = BlockPool(blocks)
        self.windows = self.window_pools(sorted(windows), max_sequences, step)
        self.now_s = 0.0
        self.max_sequences, self.step_tokens = max_sequences, step
        self.prefix_caching = prefix_caching
        planner = DraftPlanner(drafts)
        planner.costs = StepCosts({1: 1.0, 2: 1.0})  # all pay
        self.forced: dict[Sequence, int] = {}
        """How many tokens the grammar forces after each that is chosen."""
        self.scheduler = Scheduler(
            self.pool,
            self.windows,
            block_size=BLOCK_SIZE,
            max_sequences=max_sequences,
            max_step_tokens=step,
            prefix_caching=prefix_caching,
            planner=planner if drafts else None,
            low_waits_at_most_s=10,
            clock=lambda: self.now_s,
        )

    def window_pools(self, windows: list[int], sequences: int, step: int) -> list[WindowPool]:
        """As small as those of a cache may be."""
        shape = CacheShape(
            num_layers=len(windows),
            num_kv_heads=1,
            head_dim=2,
            ropes=(),
            max_context=1000,
            dtype=torch.float32,
            device=torch.device("cpu"),
            block_size=BLOCK_SIZE,
            windows=tuple(windows),
            max_sequences=sequences,
            max_step_tokens=step,
        )
        _, *counts = shape.block_counts(self.pool.total)
        return [
            WindowPool(self.pool, count, window=window, block_size=BLOCK_SIZE)
            for window, count in zip(windows, counts, strict=True)
        ]

    @rule(seconds=st.integers(1, 12))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(
        share=st.floats(0.05, 1),
        prompt_share=st.floats(0, 1),
        alike_share=st.sampled_from([0.0, 0.5, 1.0, 1.0]),
        family=st.sampled_from([1, 1, 2]),
        priority=st.sampled_from(["high", "normal", "low"]),
        right=st.integers(0, 6),
        wrong=st.integers(0, 6),
        forced=st.sampled_from([0, 0, 1, 5, 40]),
        suspect=st.sampled_from([False, False, False, True]),
    )
    def submit(
        self,
        share: float,
        prompt_share: float,
        alike_share: float,
        family: int,
        priority: Any,
        right: int,
        wrong: int,
        forced: int,
        suspect: bool,
    ) -> None:
        # Anything that the pool as a whole can hold is accepted.
        size = max(2, int(share * min(self.pool.total, 12) * BLOCK_SIZE))
        prompt = min(size - 1, max(1, int(prompt_share * size)))
        alike = int(alike_share * prompt)
        sequence = Sequence(
            [family] * alike + [10 + len(self.sequences)] * (prompt - alike),
            GenerationRequest(prompt="x", max_tokens=size - prompt, priority=priority),
            seed=0,
            text=NoText(),  # type: ignore[arg-type]
            arrival=len(self.sequences),
            drafter=SomeHold(right, right + wrong),
        )
        sequence.suspect = suspect
        self.forced[sequence] = forced
        self.sequences.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.sequences)))

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def find_damage(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.scheduler.running))
        self.scheduler.blocks.distrust(sequence)
        self.end(sequence)
        first = tuple(sequence.token_ids[:BLOCK_SIZE])
        if sequence.prefix.depth:
            assert first not in self.pool.root.children

    @precondition(lambda self: len(self.scheduler.running) > 1)
    @rule()
    def run_out_of_device_memory(self) -> None:
        self.settle()
        if len(self.scheduler.running) > 1:
            self.scheduler.relieve(self.scheduler.running[-1])

    @precondition(lambda self: self.scheduler.has_work)
    @rule(out_of_memory=st.booleans())
    def step_fails(self, out_of_memory: bool) -> None:
        """Whatever it had written by then is garbage."""
        self.settle()
        if not self.scheduler.has_work:
            return
        plan = self.scheduler.schedule()
        self.check_memory(plan)
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + chunk.rows):
                for slot in self.slots_of(chunk.sequence, position):
                    self.memory[slot] = GARBAGE
        self.scheduler.drop(plan)
        if out_of_memory and len(plan.chunks) > 1:
            self.scheduler.relieve(max(plan.chunks, key=lambda chunk: chunk.count).sequence)
            return
        for chunk in plan.chunks:
            self.end(chunk.sequence)

    @precondition(lambda self: self.ahead is not None)
    @rule()
    def step_ahead_fails(self) -> None:
        """And with it all whose tokens it was to give."""
        plan, self.ahead = self.ahead, None
        assert plan is not None
        for slot in chain(*self.written.values()):
            self.memory[slot] = GARBAGE
        self.scheduler.drop(plan)
        for chunk in plan.chunks:
            self.end(chunk.sequence)

    @rule()
    def step(self) -> None:
        plan = self.ahead or self.planned()
        slots = self.written if self.ahead else self.slots(plan)
        self.ahead = self.scheduler.schedule_ahead(plan) if self.overlaps else None
        if self.ahead is not None:
            self.check_ahead(plan, self.ahead)
            self.written = self.slots(self.ahead)
        self.land(plan, slots)

    def settle(self) -> None:
        plan, self.ahead = self.ahead, None
        if plan is not None:
            self.land(plan, self.written)

    def slots(self, plan: StepPlan) -> dict[Sequence, list[Slot]]:
        """Where a step writes the tokens of each chunk."""
        return {
            chunk.sequence: [
                slot
                for position in range(chunk.start, chunk.end)
                for slot in self.slots_of(chunk.sequence, position)
            ]
            for chunk in plan.chunks
        }

    def check_ahead(self, plan: StepPlan, ahead: StepPlan) -> None:
        """All go on behind what ``plan`` computes of them, and who gets its last token in it does
        not."""
        launched = {chunk.sequence: chunk for chunk in plan.chunks}
        assert sum(chunk.count for chunk in ahead.chunks) <= self.step_tokens
        assert not any(chunk.drafts for chunk in (*plan.chunks, *ahead.chunks))
        for chunk in ahead.chunks:
            sequence, before = chunk.sequence, launched.get(chunk.sequence)
            assert sequence.state is SequenceState.RUNNING
            assert not sequence.suspect
            assert len(sequence.blocks) >= self.blocks_of(chunk)
            known = len(sequence.token_ids)
            if before is None:
                assert chunk.start == sequence.computed
                assert chunk.end <= known
            else:
                assert chunk.start == before.end
                assert chunk.end <= known + before.samples
                assert not before.samples or sequence.generated_count + 1 < sequence.max_tokens
        chunked = {chunk.sequence for chunk in ahead.chunks}
        for sequence, before in launched.items():
            goes_on = sequence.state is SequenceState.RUNNING and before.samples
            if goes_on and sequence.generated_count + 1 < sequence.max_tokens:
                assert sequence in chunked

    def planned(self) -> StepPlan:
        before = {s: (s.computed, s.generated_count) for s in self.scheduler.running}
        waiting = self.scheduler.waiting
        plan = self.scheduler.schedule()
        self.check_plan(plan, waiting, before)
        return plan

    def land(self, plan: StepPlan, slots: dict[Sequence, list[Slot]]) -> None:
        alive = [c for c in plan.chunks if c.sequence.state is SequenceState.RUNNING]
        for chunk in plan.chunks:
            if chunk not in alive:
                # A token that nobody wants: its block must have been kept from others.
                for group, block, _ in slots[chunk.sequence]:
                    if group == 0:
                        assert self.pool.holders(block) == 1
                        assert self.pool.contents(block) is None
                        assert not any(block in s.blocks for s in self.scheduler.running)
                for slot in slots[chunk.sequence]:
                    self.memory[slot] = GARBAGE
        self.check_memory(StepPlan(tuple(alive), plan.decodes))
        for chunk in alive:
            assert self.slots(plan)[chunk.sequence] == slots[chunk.sequence]
            text = (*chunk.sequence.token_ids, *chunk.drafts)
            for position in range(chunk.start, chunk.start + chunk.rows):
                for slot in self.slots_of(chunk.sequence, position):
                    self.memory[slot] = text[: position + 1]
        self.scheduler.advance(plan)
        for chunk in alive:
            if chunk.sequence.pending == 0:
                self.take_tokens(chunk.sequence, chunk.drafts)

    def take_tokens(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """One token, those that are forced after it, and so on while drafts hold."""
        goes_on = True
        while goes_on:
            taken = 0
            while taken <= self.forced[sequence] and sequence.finish_reason is None:
                sequence.append(TOKEN)
                taken += 1
            sequence.forced_count = taken - 1
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
                return
            held = sum(1 for _ in takewhile(TOKEN.__eq__, drafts[:taken]))
            self.scheduler.accept(sequence, held)
            drafts, goes_on = drafts[held:], held == taken

    def end(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None:
            self.ended_early.add(sequence)
        self.scheduler.finish(sequence)
        still_written = self.ahead is not None and sequence in self.written
        assert still_written or not sequence.blocks

    def slots_of(self, sequence: Sequence, position: int) -> list[Slot]:
        block, offset = sequence.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
        partners = [int(window.partners[block]) for window in self.windows]
        return [(group, each, offset) for group, each in enumerate([block, *partners])]

    def seen_from(self, start: int) -> list[int]:
        """The first position that the token at ``start`` sees in each group of layers."""
        return [0, *(max(0, start + 1 - window.window) for window in self.windows)]

    def check_memory(self, plan: StepPlan) -> None:
        """Everyone reads its own text, and writes where nobody else reads."""
        written: set[Slot] = set()
        for chunk in plan.chunks:
            sequence = chunk.sequence
            for position in range(chunk.start):
                slots = self.slots_of(sequence, position)
                for first, slot in zip(self.seen_from(chunk.start), slots, strict=True):
                    if position >= first:
                        assert self.memory[slot] == tuple(sequence.token_ids[: position + 1])
            for index in range(chunk.start // BLOCK_SIZE, self.blocks_of(chunk)):
                block = sequence.blocks[index]
                assert self.pool.holders(block) == 1
                assert self.pool.contents(block) is None
                slots = self.slots_of(sequence, index * BLOCK_SIZE)
                assert written.isdisjoint(slots)
                written.update(slots)

    @staticmethod
    def blocks_of(chunk: Chunk) -> int:
        return -(-(chunk.start + chunk.rows) // BLOCK_SIZE)

    def check_plan(
        self, plan: StepPlan, waiting: tuple[Sequence, ...], before: dict[Sequence, Any]
    ) -> None:
        had_work = bool(waiting or before)
        assert bool(plan.chunks) == had_work  # no deadlock: where there is work, some is done
        tokens = sum(chunk.rows for chunk in plan.chunks)
        assert tokens <= self.step_tokens
        assert not plan.prefills or not any(chunk.drafts for chunk in plan.chunks)
        chunked = [chunk.sequence for chunk in plan.chunks]
        assert len(set(chunked)) == len(chunked)
        for chunk in plan.chunks:
            assert chunk.sequence.state is SequenceState.RUNNING
            assert chunk.start == chunk.sequence.computed
            assert len(chunk.sequence.blocks) >= self.blocks_of(chunk)
        running = [s for s in self.scheduler.running if not s.suspect]
        if any(sequence.suspect for sequence in chunked):
            assert len(chunked) == 1
            running = []
        assert not running or running[0] in chunked  # no livelock
        for sequence in running:
            # Each sequence that decodes has its token; a prefill may wait for work of this step.
            if sequence not in chunked and tokens < self.step_tokens:
                assert sequence.pending > 1
                assert self.completed_by_a_better(plan, sequence)
        if self.prefix_caching:
            for chunk in plan.prefills:
                assert not self.completed_by_a_better(plan, chunk.sequence)
        # Who was admitted outranks everyone still waiting, but for those preempted just now; a high
        # one may pass others that rank as high, if it preempts one that does not.
        still = [s for s in self.scheduler.waiting if s in waiting]
        for admitted in [s for s in self.scheduler.running if s in waiting]:
            passed = [s for s in still if s.order < admitted.order]
            somebody_was_preempted = len(still) < len(self.scheduler.waiting)
            assert not passed or (admitted.asks_for_high and somebody_was_preempted)
            assert all(s.rank == HIGH_RANK and not s.asks_for_high for s in passed)
        # Who lost its blocks is outranked by every sequence that ran and kept them.
        preempted = [s for s in before if s.state is SequenceState.WAITING]
        kept = [s for s in before if s.state is SequenceState.RUNNING]
        for victim in preempted:
            assert all(sequence.order < victim.order for sequence in kept)

    def completed_by_a_better(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Whether this step computes the block that ``sequence`` comes to next, for another."""
        index, inside = divmod(sequence.computed, BLOCK_SIZE)
        end = (index + 1) * BLOCK_SIZE
        if inside or end >= len(sequence.token_ids):
            return False
        # Blocks that a failed step had allocated, and those that were withdrawn, stay its own.
        if len(sequence.blocks) > self.blocks_known(plan, sequence) or not sequence.prefix.known:
            return False
        return any(
            other.sequence.order < sequence.order
            and other.sequence.prefix.known
            and other.start < end <= other.start + other.count
            and other.sequence.token_ids[:end] == sequence.token_ids[:end]
            for other in plan.prefills
        )

    @staticmethod
    def blocks_known(plan: StepPlan, sequence: Sequence) -> int:
        chunk = next((c for c in plan.chunks if c.sequence is sequence), None)
        tokens = sequence.computed + (chunk.count if chunk else 0)
        return -(-tokens // BLOCK_SIZE)

    @invariant()
    def limits_hold_and_every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert len(self.scheduler.running) <= min(self.max_sequences, self.step_tokens)
        self.scheduler.check_integrity()
        live = {*self.scheduler.running, *self.scheduler.waiting}
        ended = {s for s in self.sequences if s.state is SequenceState.FINISHED}
        assert live | ended == set(self.sequences)
        assert not live & ended
        for sequence in self.sequences:
            assert (
                0 <= sequence.cached_tokens < sequence.prompt_length or not sequence.cached_tokens
            )
        if not self.prefix_caching:
            assert self.pool.kept_count == self.scheduler.blocks.hits_total == 0

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # No livelock: the first of those that run gains a token or a chunk in each step, and what
        # it has it never loses, so all of them together cannot take longer than one by one, twice
        # as long where suspects alternate with them.
        tokens = sum(s.prompt_length + s.max_tokens for s in self.sequences)
        for _ in range(2 * tokens + 1):
            if not self.scheduler.has_work:
                break
            self.step()
            self.limits_hold_and_every_block_is_accounted_for()
        self.settle()
        assert not self.scheduler.has_work
        assert self.pool.free_count == self.pool.total
        for sequence in self.sequences:
            if sequence not in self.ended_early:
                assert sequence.finish_reason == "length"
                assert sequence.generated_count == sequence.max_tokens


SchedulerPromises.TestCase.settings = settings(
    max_examples=sized(usual=100, full=1_000), stateful_step_count=40
)
TestSchedulerPromises = SchedulerPromises.TestCase
