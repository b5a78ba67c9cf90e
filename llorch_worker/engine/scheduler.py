"""The scheduler: which sequences run in the next step, and with how many tokens.

Running and waiting sequences are two lists, both sorted by :attr:`Sequence.order` (priority,
arrival, choice). The rules:

- Decodes come first: each running sequence that lacks one token gets it in every step, and with
  it the tokens that its grammar forced after it, as far as the token budget goes and no prefill
  of a more urgent class needs it. Prefill takes the rest of the budget, so a long prompt delays
  decodes by one chunk at most.
- The head of the waiting list is admitted when its known tokens fit into free blocks; blocks that
  it shares with running sequences need none. Nothing overtakes the head, so short prompts cannot
  starve a long one of their class. Its blocks are reserved at once and allocated chunk by chunk.
- Only a decode can lack a block. Then the last running sequence gives up its blocks and waits,
  even if it needs the block itself, so no sequence yields to one that it outranks. The first
  running sequence never yields while another holds blocks, and alone it fits (submit refuses
  larger requests). Some sequence always advances: there is no deadlock and no livelock.
- A high sequence does not wait for a place that a lower one holds: the last running sequence of a
  lower rank gives up its own. A sequence that has waited long enough ranks as high from then on,
  ahead of later ones. It starts when the next sequence ends, and is not preempted for others. A
  high sequence may pass it only by preempting one that has not aged, so few do.
- Before each chunk a prefill takes the published blocks that hold what it would compute next. If
  an earlier chunk of the same step completes that block, the prefill sits the step out and finds
  the block in the next. So jobs that arrive together compute what they share once, and the one
  that outranks the others computes it. A prefill waits for no other work: if that chunk is
  cancelled, preempted or fails, the next step does not contain it. The first running sequence
  never sits out, because no chunk precedes its own.
- A suspect, whose job may end the engine, computes in steps of its own until its first token. They
  alternate with those of all others, and no step is planned ahead of or after them.
- A step without a prefill computes the drafts that promise more speed, as far as the
  token budget and free blocks go.
- A step is planned while the one before it is still on the device and its tokens are unknown,
  unless these decide who runs (see :meth:`Scheduler.schedule_ahead`).
- A launched step may still write to the blocks of a sequence that has ended. They become free when
  no such step is left.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import takewhile
from operator import attrgetter

from msgspec.structs import replace

from llorch_worker.cache import BlockPool, WindowPool
from llorch_worker.engine.draft_planner import DraftPlanner
from llorch_worker.engine.sequence import HIGH_RANK, Sequence, SequenceState
from llorch_worker.engine.sequence_blocks import BlockKey, SequenceBlocks
from llorch_worker.engine.step_plan import Chunk, StepPlan
from llorch_worker.engine_options import EngineOptions, PrefixSharing

_ORDER = attrgetter("order")


class _Undecided(Exception):
    """A step cannot be planned before the one before it is done."""


class Scheduler:
    """Owns the waiting and the running list and the blocks that sequences hold."""

    def __init__(
        self,
        pool: BlockPool,
        windows: Items[WindowPool] = (),
        *,
        block_size: int,
        max_sequences: int,
        max_step_tokens: int,
        prefix_caching: bool = True,
        prefix_sharing: PrefixSharing = "all",
        planner: DraftPlanner | None = None,
        low_waits_at_most_s: float = EngineOptions.low_waits_at_most_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``block_size`` in tokens. A step computes at most ``max_step_tokens`` tokens. ``planner``
        says how many drafts to add; without it there are none.

        Each running sequence is due one token a step, so at most ``max_step_tokens`` run at once. A
        sequence that has waited ``low_waits_at_most_s`` in all, by ``clock``, ranks as high.
        """
        self.blocks = SequenceBlocks(
            pool,
            windows,
            block_size=block_size,
            prefix_caching=prefix_caching,
            prefix_sharing=prefix_sharing,
        )
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._max_running = min(max_sequences, max_step_tokens)
        self._running_limit = self._max_running
        self.planner = planner
        self._low_waits_at_most_s = low_waits_at_most_s
        self._clock = clock
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._was_alone = False
        """Whether the last step was a suspect's own."""
        self._launched: list[StepPlan] = []
        """Planned steps that the device may still work on; two at most."""
        self.preempted_total = 0

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. The caller has checked that it fits into the whole pool."""
        self.blocks.enter(sequence)
        self._wait(sequence)

    def schedule(self) -> StepPlan:
        """Plans the next step and allocates the blocks for its tokens. No launched step is left.

        The caller passes the plan to :meth:`advance` or :meth:`drop` when the step is done.
        """
        if self.planner is not None:
            # Drafts that did not hold make nobody yield or wait.
            for running in self._running:
                self.blocks.trim(running)
        self._age()
        self._preempt_for_high()
        plan = self._plan(self._isolated())
        if not plan.chunks and (suspect := self._isolated()) is not None:
            # The others' step, but the only one of them has given up its blocks.
            plan = self._plan(suspect)
        return self._launch(plan)

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plans the step after ``plan``, which is on the device, as if its tokens were known.

        A sequence that may end with a token of ``plan`` takes part, unless that is its last one in
        any case: a token for a sequence that has ended is discarded. So is one before which a
        grammar forces others.

        Returns None where the end of ``plan`` decides what to compute: with drafts in it or after
        it, suspects, a sequence of high priority that needs the place of another, a decode that
        needs the blocks of another, and a prefill that will find a block that ``plan`` computes.
        Then some sequences keep their next blocks early.
        """
        ready = (*self._running, *self._waiting[:1])
        if plan.has_drafts or [s for s in ready if s.suspect]:
            return None
        self._age()
        if self._next_high() is not None:
            return None
        try:
            ahead = self._plan(None, plan)
        except _Undecided:
            return None
        if not ahead.chunks:
            return None
        if self.planner is not None and not ahead.prefills:
            sampling = [chunk for chunk in plan.chunks if chunk.samples]
            if self.planner.pays(sampling):
                return None
        return self._launch(ahead)

    def _isolated(self) -> int | None:
        """The arrival of the suspect whose step is next; None if it is that of all others."""
        ready = [*self._running, *self._waiting[:1]]
        if any(s.suspect for s in ready) and self._waiting and self._admissible(None) is None:
            ready.pop()
        suspect = next((s for s in ready if s.suspect), None)
        others = not all(s.suspect for s in ready)
        self._was_alone = suspect is not None and not (others and self._was_alone)
        return suspect.arrival if suspect is not None and self._was_alone else None

    def _plan(self, suspect: int | None, after: StepPlan | None = None) -> StepPlan:
        """``suspect``: see :meth:`_isolated`. ``after``: a launched step, whose sequences go on
        behind its chunks. Raises ``_Undecided`` where its end decides what to compute."""
        launched = {} if after is None else {chunk.sequence: chunk for chunk in after.chunks}

        def takes_part(sequence: Sequence) -> bool:
            return not sequence.suspect if suspect is None else sequence.arrival == suspect

        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        running = self._running
        if suspect is not None or [s for s in running if s.suspect]:
            running = [s for s in running if takes_part(s)]
        for sequence in running:
            if (rest := _rest(sequence, launched.get(sequence))) is not None:
                decodes_next = rest.start > 0 and rest.count <= 1 + sequence.forced_count
                (decodes if decodes_next else prefills).append(rest)
        chunks = self._decodes(decodes, may_preempt=after is None)
        decoding = len(chunks)
        budget = self._max_step_tokens - sum([chunk.count for chunk in chunks])
        prefills = [rest for rest in prefills if rest.sequence.state is SequenceState.RUNNING]
        prefills.reverse()
        completed: set[BlockKey] = set()
        coming: set[BlockKey] = set()
        for chunk in () if after is None else after.prefills:
            self._note_completed(chunk, coming)
        while budget > 0:
            head = self._admissible(prefills[-1].sequence if prefills else None)
            if head is not None and (suspect is None or takes_part(head)):
                self._admit(head)
                if not takes_part(head):
                    continue
                sequence = head
            elif prefills:
                sequence = prefills.pop().sequence
            else:
                break
            in_flight = launched.get(sequence)
            if in_flight is None:
                self.blocks.take_cached(sequence)
                if completed or coming:
                    wanted = self.blocks.wanted_key(sequence)
                    if wanted in coming:
                        raise _Undecided
                    if wanted in completed:
                        continue
            rest = _rest(sequence, in_flight)
            assert rest is not None, "a prefill has nothing to compute"
            chunk = replace(rest, count=min(budget, rest.count))
            if not self.blocks.allocate(sequence, chunk.end):
                raise RuntimeError("the blocks reserved for a prefill are not free")
            if in_flight is None:
                self._note_completed(chunk, completed)
            chunks.append(chunk)
            budget -= chunk.count
        if after is None and len(chunks) == decoding and self.planner is not None:
            chunks = self.planner.with_drafts(chunks, budget, self.blocks.allocate)
        return StepPlan(tuple(chunks), decoding)

    def _note_completed(self, chunk: Chunk, completed: set[BlockKey]) -> None:
        key = self.blocks.completed_key(chunk.sequence, chunk.count)
        if key is not None:
            completed.add(key)

    def accept(self, sequence: Sequence, drafts: int) -> None:
        """Notes that the step has computed the next ``drafts`` tokens of ``sequence`` as drafts."""
        self.blocks.advance(sequence, drafts)

    def advance(self, plan: StepPlan) -> None:
        """Notes that the device has computed the step."""
        running, advance = SequenceState.RUNNING, self.blocks.advance
        for chunk in plan.chunks:
            if (sequence := chunk.sequence).state is running:
                advance(sequence, chunk.count)
        self.drop(plan)

    def drop(self, plan: StepPlan) -> None:
        """Notes that the device is done with the step, computed or failed."""
        self._launched = [other for other in self._launched if other is not plan]
        finished = SequenceState.FINISHED
        for sequence in [c.sequence for c in plan.chunks if c.sequence.state is finished]:
            self._release_unwritten(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, waiting or running; does nothing if it is finished.

        Its blocks are free at once, or when the launched steps that write to them are done.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        self._remove(sequence)
        self._release_unwritten(sequence)
        sequence.state = SequenceState.FINISHED
        self._running_limit = min(self._max_running, self._running_limit + 1)

    def preempt(self, sequence: Sequence) -> None:
        """Returns a running sequence to the waiting list; its tokens will be computed again."""
        self._remove(sequence)
        if not sequence.decoding:
            # It got no token, so it might as well have waited. Otherwise a long prefill would begin
            # anew after each of many preemptions.
            sequence.waited_s += self._clock() - sequence.admitted_s
        self.blocks.release(sequence)
        sequence.state = SequenceState.WAITING
        self._wait(sequence)
        self.preempted_total += 1

    def relieve(self, sequence: Sequence) -> None:
        """Preempts ``sequence``, and runs one sequence fewer until another has finished.

        For a device out of memory: the same batch would fail again.
        """
        self.preempt(sequence)
        self._running_limit = max(1, len(self._running))

    def check_integrity(self) -> None:
        """Raises ``RuntimeError`` unless each block is free or held by those that list it."""
        chunks = (chunk for plan in self._launched for chunk in plan.chunks)
        holding = {*self._running, *(chunk.sequence for chunk in chunks)}
        self.blocks.check_integrity(holding, self._waiting)

    def _wait(self, sequence: Sequence) -> None:
        sequence.waiting_since_s = self._clock()
        insort(self._waiting, sequence, key=_ORDER)

    def _age(self) -> None:
        """Ranks sequences that have waited long enough as high."""
        lower = [s for s in self._waiting if s.rank > HIGH_RANK]
        if not lower:
            return
        now_s = self._clock()
        for sequence in lower:
            if sequence.waited_s + now_s - sequence.waiting_since_s >= self._low_waits_at_most_s:
                self._remove(sequence)
                sequence.rank = HIGH_RANK
                insort(self._waiting, sequence, key=_ORDER)

    def _preempt_for_high(self) -> None:
        """Starts the high sequences for which lower ones must give up their places."""
        while (found := self._next_high()) is not None:
            sequence, victims = found
            for victim in victims:
                self.preempt(victim)
            self._admit(sequence)

    def _next_high(self) -> tuple[Sequence, list[Sequence]] | None:
        """The first waiting sequence that asked for high priority, and those to preempt for it.

        None if it need not wait, or if all lower sequences together hold too little.
        """
        if not self._running or self._running[-1].rank == HIGH_RANK:
            return None
        ranked_high = takewhile(lambda s: s.rank == HIGH_RANK, self._waiting)
        high = next((s for s in ranked_high if s.asks_for_high), None)
        if high is None or self._admissible(None) is high:
            return None
        victims: list[Sequence] = []
        for victim in reversed(self._running):
            if victim.rank == HIGH_RANK:
                break
            victims.append(victim)
            left = len(self._running) - len(victims)
            if left < self._running_limit and self.blocks.fits_without(high, victims, spare=left):
                return high, victims
        return None

    def _decodes(self, due: Items[Chunk], *, may_preempt: bool) -> list[Chunk]:
        """Those of ``due``, the pending tokens of each decode, for which there are blocks. Raises
        ``_Undecided`` where that takes a preemption and none ``may_preempt``."""
        chunks = []
        size, running = self._block_size, SequenceState.RUNNING
        spare = self._max_step_tokens - len(self._running)
        prefill_rank: float | None = None
        for chunk in due:
            sequence = chunk.sequence
            # An earlier sequence may have preempted this one.
            if sequence.state is not running:
                continue
            if chunk.count > 1:
                if prefill_rank is None:
                    prefill_rank = self._prefill_rank()
                count = min(chunk.count, 1 + spare) if sequence.rank <= prefill_rank else 1
                spare -= count - 1
                chunk = replace(chunk, count=count)
            end = chunk.start + chunk.count
            # Few decodes begin a block.
            if end > size * len(sequence.blocks) and not self.blocks.allocate(sequence, end):
                if not may_preempt:
                    raise _Undecided
                if not self._make_room(chunk):
                    spare += chunk.count - 1
                    continue
            chunks.append(chunk)
        return chunks

    def _prefill_rank(self) -> float:
        """The rank of the most urgent prefill of the next step; infinite if there is none."""
        prefill = next((s for s in self._running if not s.decoding), None)
        head = self._admissible(prefill)
        first = prefill if head is None else head
        return math.inf if first is None else first.rank

    def _make_room(self, chunk: Chunk) -> bool:
        """Allocates the blocks of ``chunk``; False if its sequence had to yield."""
        while not self.blocks.allocate(chunk.sequence, chunk.end):
            victim = self._running[-1]
            self.preempt(victim)
            if victim is chunk.sequence:
                return False
        return True

    def _admissible(self, rival: Sequence | None) -> Sequence | None:
        """The head of the waiting list if it may start now and goes before ``rival``."""
        if not self._waiting or len(self._running) >= self._running_limit:
            return None
        head = self._waiting[0]
        if rival is not None and rival.order < head.order:
            return None
        # One spare block for each running sequence: otherwise the newcomer would be preempted, and
        # its prefill lost, as soon as those cross their next block boundary.
        return head if self.blocks.fits(head, spare=len(self._running)) else None

    def _admit(self, sequence: Sequence) -> None:
        self._remove(sequence)
        sequence.admitted_s = self._clock()
        sequence.waited_s += sequence.admitted_s - sequence.waiting_since_s
        self.blocks.reserve(sequence)
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=_ORDER)
        # It fits by what it shares with others, and may compute behind them.
        self.blocks.take_cached(sequence)

    def _launch(self, plan: StepPlan) -> StepPlan:
        if plan.chunks:
            self._launched.append(plan)
        return plan

    def _release_unwritten(self, sequence: Sequence) -> None:
        """Releases the blocks unless a launched step writes to them."""
        if not any(chunk.sequence is sequence for plan in self._launched for chunk in plan.chunks):
            self.blocks.release(sequence)

    def _remove(self, sequence: Sequence) -> None:
        waits = sequence.state is SequenceState.WAITING
        queue = self._waiting if waits else self._running
        del queue[bisect_left(queue, sequence.order, key=_ORDER)]


def _rest(sequence: Sequence, launched: Chunk | None) -> Chunk | None:
    """What is left to compute of a sequence behind its ``launched`` chunk, if that gives a token
    with this one; None if nothing is."""
    known = len(sequence.token_ids)
    if launched is None:
        start = sequence.computed
    else:
        start = launched.start + launched.count
        if start >= known and sequence.samples:
            known += 1
            if known - sequence.prompt_length >= sequence.max_tokens:
                return None
    return Chunk(sequence, start, known - start) if known > start else None
