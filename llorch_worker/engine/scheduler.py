"""Who runs in the next step, and with how many tokens.

Running sequences live in one list and waiting ones in another, both sorted by
:attr:`Sequence.order` (priority, arrival, choice). From that order follow all the rules:

- Decodes come first: each running sequence that lacks one token gets it in every step. Prefill
  takes what is left of the token budget, so a long prompt delays decodes by one chunk at most.
- The head of the waiting list is admitted when its known tokens fit into free blocks. Nobody
  overtakes it, so a long prompt cannot starve behind short ones of its own class.
- Only a decode can lack a block. Then the last of the running list gives up its own and waits,
  be it the very sequence that asked; so nobody ever yields to one that it outranks. The first of
  the running list never yields while another holds blocks, and alone it fits (larger requests are
  refused at submit): some sequence always advances, hence no deadlock and no livelock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from llorch_worker.cache import BlockPool
from llorch_worker.engine.sequence import Sequence, SequenceState

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
        return self.start + self.count == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step: decodes, then prefill chunks."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[Sequence, ...]

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Owns the waiting and the running list and the blocks that running sequences hold."""

    def __init__(
        self, blocks: BlockPool, *, block_size: int, max_sequences: int, max_step_tokens: int
    ) -> None:
        """``block_size`` in tokens. A step computes at most ``max_step_tokens`` tokens.

        As each running sequence is owed one token a step, no more run than the budget has tokens.
        """
        self._blocks = blocks
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._max_running = min(max_sequences, max_step_tokens)
        self._running_limit = self._max_running
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
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

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens of one sequence."""
        return -(-tokens // self._block_size)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. The caller has checked that it fits into the whole pool."""
        insort(self._waiting, sequence, key=_ORDER)

    def schedule(self) -> StepPlan:
        """The next step. Blocks for its tokens are allocated; nothing else has happened yet."""
        chunks = self._decodes()
        budget = self._max_step_tokens - len(chunks)
        prefills = [s for s in self._running if s.pending > 1]
        prefills.reverse()
        admitted: list[Sequence] = []
        while budget > 0:
            sequence = self._admissible(prefills[-1] if prefills else None)
            if sequence is not None:
                self._admit(sequence)
                admitted.append(sequence)
            elif prefills:
                sequence = prefills.pop()
            else:
                break
            count = min(budget, sequence.pending)
            chunks.append(Chunk(sequence, sequence.computed, count))
            budget -= count
        return StepPlan(tuple(chunks), tuple(admitted))

    def advance(self, plan: StepPlan) -> None:
        """Notes that the step was computed."""
        for chunk in plan.chunks:
            chunk.sequence.computed += chunk.count

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and frees its blocks; no effect when finished."""
        if sequence.state is SequenceState.FINISHED:
            return
        self._take_out(sequence)
        self._release(sequence)
        sequence.state = SequenceState.FINISHED
        self._running_limit = min(self._max_running, self._running_limit + 1)

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to wait; it will be recomputed from its ids."""
        self._take_out(sequence)
        self._release(sequence)
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
        """Raises ``RuntimeError`` unless every block is free or held exactly once."""
        self._blocks.check_integrity()
        held = [block for sequence in self._running for block in sequence.blocks]
        if len(set(held)) != len(held):
            raise RuntimeError("a KV block is held by two sequences")
        if len(held) + self._blocks.free_count != self._blocks.total:
            raise RuntimeError(
                f"{self._blocks.total} KV blocks, but {len(held)} held "
                f"and {self._blocks.free_count} free"
            )
        if any(sequence.blocks or sequence.computed for sequence in self._waiting):
            raise RuntimeError("a waiting sequence holds KV blocks")

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
        missing = self.blocks_for(len(sequence.token_ids)) - len(sequence.blocks)
        if missing <= 0:
            return True
        while self._blocks.free_count < missing:
            victim = self._running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(self._blocks.allocate(missing))
        return True

    def _admissible(self, rival: Sequence | None) -> Sequence | None:
        """The head of the waiting list if it may start now and goes before ``rival``."""
        if not self._waiting or len(self._running) >= self._running_limit:
            return None
        head = self._waiting[0]
        if rival is not None and rival.order < head.order:
            return None
        needed = self.blocks_for(len(head.token_ids))
        # One block of headroom for each running sequence: otherwise the newcomer would be
        # preempted, and its prefill lost, as soon as those cross their next block boundary.
        return head if needed + len(self._running) <= self._blocks.free_count else None

    def _admit(self, sequence: Sequence) -> None:
        self._waiting.pop(0)
        sequence.blocks.extend(self._blocks.allocate(self.blocks_for(len(sequence.token_ids))))
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=_ORDER)

    def _take_out(self, sequence: Sequence) -> None:
        waits = sequence.state is SequenceState.WAITING
        queue = self._waiting if waits else self._running
        del queue[bisect_left(queue, sequence.order, key=_ORDER)]

    def _release(self, sequence: Sequence) -> None:
        if sequence.blocks:
            self._blocks.free(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0
