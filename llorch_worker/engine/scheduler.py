"""Who runs in the next step, and with how many tokens.

Running sequences live in one list and waiting ones in another, both sorted by
:attr:`Sequence.order` (priority, arrival, choice). From that order follow all the rules:

- Decodes come first: each running sequence that lacks one token gets it in every step. Prefill
  takes what is left of the token budget, so a long prompt delays decodes by one chunk at most.
- The head of the waiting list is admitted when its known tokens fit into free blocks; what it
  shares with running sequences needs none. Nobody overtakes it, so a long prompt cannot starve
  behind short ones of its own class. Blocks are promised at once and taken chunk by chunk.
- Only a decode can lack a block. Then the last of the running list gives up its own and waits,
  be it the very sequence that asked; so nobody ever yields to one that it outranks. The first of
  the running list never yields while another holds blocks, and alone it fits (larger requests are
  refused at submit): some sequence always advances, hence no deadlock and no livelock.
- Before each chunk a prefill takes the published blocks that hold what it would compute next.
  Where an earlier chunk of the same step completes its next block, it sits the step out and
  finds that block in the next: so jobs that arrive together compute what they share once, and
  the first of them is always the one that outranks the others. It waits for nothing but work of
  this very step. Where that is cancelled, preempted or fails, the next step has no such chunk
  and nobody waits for one; and the first prefill of a step has none before it, so the first of
  the running list never sits out and all that is said above holds.
- A step may be planned while the one before it is still on the device, its tokens unknown: only
  where nothing that they could be changes who runs (see :meth:`Scheduler.schedule_ahead`). Blocks
  of a sequence that ends meanwhile are free once no step that was launched writes to them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from llorch_worker.cache import BlockPool
from llorch_worker.engine.sequence import Sequence, SequenceState
from llorch_worker.engine.sequence_blocks import BlockKey, SequenceBlocks

_ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Chunk:
    """``count`` pending tokens of one sequence, from ``start``."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token, so that the next one is due."""
        # Beyond it, where the step was planned before the last token was known.
        return self.start + self.count >= len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step: first ``decodes`` chunks of one token, then prefill chunks."""

    chunks: tuple[Chunk, ...]
    decodes: int

    @property
    def prefills(self) -> tuple[Chunk, ...]:
        """The chunks that begin a sequence or go on with its prefill."""
        return self.chunks[self.decodes :]

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Owns the waiting and the running list and the blocks that running sequences hold."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_sequences: int,
        max_step_tokens: int,
        prefix_caching: bool = True,
    ) -> None:
        """``block_size`` in tokens. A step computes at most ``max_step_tokens`` tokens.

        As each running sequence is owed one token a step, no more run than the budget has tokens.
        """
        self.blocks = SequenceBlocks(pool, block_size=block_size, prefix_caching=prefix_caching)
        self._max_step_tokens = max_step_tokens
        self._max_running = min(max_sequences, max_step_tokens)
        self._running_limit = self._max_running
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._ahead: list[StepPlan] = []
        """Steps planned ahead that have not landed; two at most."""
        self._ending: list[Sequence] = []
        """Finished, and in one of those steps: they keep their blocks until it lands."""
        self.preempted_total = 0

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. The caller has checked that it fits into the whole pool."""
        self.blocks.enter(sequence)
        insort(self._waiting, sequence, key=_ORDER)

    def schedule(self) -> StepPlan:
        """The next step. Blocks for its tokens are allocated; nothing else has happened yet."""
        chunks = self._decodes()
        decodes = len(chunks)
        budget = self._max_step_tokens - decodes
        prefills = [s for s in self._running if s.pending > 1]
        prefills.reverse()
        completed: set[BlockKey] = set()
        while budget > 0:
            sequence = self._admissible(prefills[-1] if prefills else None)
            if sequence is not None:
                self._admit(sequence)
            elif prefills:
                sequence = prefills.pop()
            else:
                break
            self.blocks.take_found(sequence)
            if completed and self.blocks.could_share(sequence) in completed:
                continue
            count = min(budget, sequence.pending)
            self.blocks.cover(sequence, sequence.computed + count)
            if (key := self.blocks.completes(sequence, count)) is not None:
                completed.add(key)
            chunks.append(Chunk(sequence, sequence.computed, count))
            budget -= count
        return StepPlan(tuple(chunks), decodes)

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after ``plan``, which is on the device: one token more for those that go on.

        None unless it is certain, whatever the tokens of ``plan`` are: everyone who runs decodes
        in ``plan`` and samples plainly, nobody may start, and there are blocks for all. Who
        reaches ``max_tokens`` with ``plan`` is left out. Who ends in it for another reason is not,
        and has one token computed that nobody wants.
        """
        here = [c.sequence for c in plan.chunks if c.sequence.state is SequenceState.RUNNING]
        if plan.prefills or len(here) < len(self._running) or not all(s.plain for s in here):
            return None
        here = [s for s in here if s.generated_count + 1 < s.request.max_tokens]
        if not here or self._admissible(None) is not None or not self.blocks.grow_ahead(here):
            return None
        ahead = StepPlan(tuple(Chunk(s, s.computed + 1, 1) for s in here), len(here))
        self._ahead.append(ahead)
        return ahead

    def advance(self, plan: StepPlan) -> None:
        """Notes that the step was computed."""
        for chunk in plan.chunks:
            if chunk.sequence.state is SequenceState.RUNNING:
                chunk.sequence.computed += chunk.count
                self.blocks.publish(chunk.sequence)
        self.drop(plan)

    def drop(self, plan: StepPlan) -> None:
        """Notes that the device is done with the step, be it that it failed."""
        self._ahead = [other for other in self._ahead if other is not plan]
        ending, self._ending = self._ending, []
        for sequence in ending:
            self._release(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; no effect when finished.

        Its blocks are free at once or, where a step planned ahead writes to them, when it lands.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        self._take_out(sequence)
        self._release(sequence)
        sequence.state = SequenceState.FINISHED
        self._running_limit = min(self._max_running, self._running_limit + 1)

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to wait; it will be recomputed from its ids."""
        self._take_out(sequence)
        self.blocks.release(sequence)
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=_ORDER)
        self.preempted_total += 1

    def relieve(self, sequence: Sequence) -> None:
        """Preempts, and runs one sequence fewer until another has finished.

        For a device out of memory: the same batch again would fail again.
        """
        self.preempt(sequence)
        self._running_limit = max(1, len(self._running))

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` unless every block is free or held by those that list it."""
        self.blocks.check_integrity([*self._running, *self._ending], self._waiting)

    def _decodes(self) -> list[Chunk]:
        chunks = []
        for sequence in tuple(self._running):
            # An earlier one of the loop may have preempted this one.
            if sequence.state is not SequenceState.RUNNING or sequence.pending != 1:
                continue
            if self._grow(sequence):
                chunks.append(Chunk(sequence, sequence.computed, 1))
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        """Gives ``sequence`` blocks for all its tokens; False when it had to yield itself."""
        while not self.blocks.grow(sequence):
            victim = self._running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admissible(self, rival: Sequence | None) -> Sequence | None:
        """The head of the waiting list if it may start now and goes before ``rival``."""
        if not self._waiting or len(self._running) >= self._running_limit:
            return None
        head = self._waiting[0]
        if rival is not None and rival.order < head.order:
            return None
        # One block of headroom for each running sequence: otherwise the newcomer would be
        # preempted, and its prefill lost, as soon as those cross their next block boundary.
        return head if self.blocks.fits(head, spare=len(self._running)) else None

    def _admit(self, sequence: Sequence) -> None:
        self._waiting.pop(0)
        self.blocks.promise(sequence)
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=_ORDER)

    def _release(self, sequence: Sequence) -> None:
        if any(chunk.sequence is sequence for plan in self._ahead for chunk in plan.chunks):
            self._ending.append(sequence)
        else:
            self.blocks.release(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        waits = sequence.state is SequenceState.WAITING
        queue = self._waiting if waits else self._running
        del queue[bisect_left(queue, sequence.order, key=_ORDER)]
