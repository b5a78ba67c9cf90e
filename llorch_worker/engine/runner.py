"""One step on the device: a plan in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.cache import Places, UnifiedCache
from llorch_worker.engine.block_tables import BlockTables, TableChanges
from llorch_worker.engine.device.queue import DeviceQueue, Pending, device_queue
from llorch_worker.engine.draft_logits import DraftLogits
from llorch_worker.engine.prompt_logprobs import ScoredTokens
from llorch_worker.engine.prompt_scorer import PromptScorer
from llorch_worker.engine.sampling.sampler import Sampled, Sampler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import Chunk, StepPlan
from llorch_worker.model import ForwardModel, RaggedBatch

Integers = npt.NDArray[np.int64]
Uploaded = npt.NDArray[np.integer]

_ALIGNED_BYTES = 16
"""Kernels load as many at once; uploaded arrays begin at multiples of it."""


@dataclass(slots=True)
class Step:
    """A step on the device, or the error of its launch."""

    plan: StepPlan
    pending: Pending | Exception
    sequences: tuple[Sequence, ...] = ()
    """Those that are due a token, row by row."""
    positions: list[int] = field(default_factory=list)
    """Of each row's token within its choice."""
    sampled: bool = False
    """Whether sampling was launched."""
    scorer: PromptScorer | None = None
    drafts: DraftLogits | None = None

    def read(self) -> Sampled:
        """Waits until the step is done, and returns its tokens, row by row. Raises its error."""
        if isinstance(self.pending, Exception):
            raise self.pending
        return self.pending.read() or Sampled([], {}, frozenset())

    def scored(self) -> list[tuple[Sequence, ScoredTokens]]:
        """The prompts whose tokens the step has scored, once it was read."""
        return [] if self.scorer is None else self.scorer.read()


@dataclass(frozen=True, slots=True)
class _Layout:
    """A step's arrays as the host lays them out."""

    ids: Integers
    """0 where only the device knows the token."""
    positions: Integers
    logits_rows: Integers
    slots: tuple[Integers, ...]
    """Of each group of layers."""
    tables: TableChanges
    unknown: Integers
    """[unknown]: where tokens belong that only the device knows."""
    rows_before: Integers
    """[unknown]: the rows of the step before that give them."""
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]


class Runner:
    """Lays out steps and launches them. Only the engine thread may call it."""

    def __init__(
        self,
        model: ForwardModel,
        cache: UnifiedCache,
        sampler: Sampler,
        device: torch.device,
        queue: DeviceQueue | None = None,
        *,
        scored_rows: int = 1,
    ) -> None:
        """``queue`` defaults to that of ``device``. ``scored_rows``: the most rows of logits that
        prompts are scored with at once."""
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._device = device
        self._queue = device_queue(device) if queue is None else queue
        self._scored_rows = scored_rows
        self._tables = BlockTables(cache.windows, device)

    @property
    def overlaps(self) -> bool:
        """See ``DeviceQueue``."""
        return self._queue.overlaps

    def launch(self, plan: StepPlan, after: Step | None = None) -> Step:
        """Starts computing a step. ``after``: the step before, if its tokens are not known yet.

        Sampling starts too, for the sequences of which the step computes the last token, unless a
        grammar has to see the tokens of ``after`` first. Then :meth:`sample` must follow.
        """
        # In the order of their rows in the tables, which then need not be copied.
        chunks = self._in_order(plan)
        # Chunk.samples, without a call for each.
        samples = [
            (sequence := chunk.sequence).samples
            and chunk.start + chunk.count >= len(sequence.token_ids)
            for chunk in chunks
        ]
        due = [*compress(chunks, samples)]
        sequences = tuple([chunk.sequence for chunk in due])
        vocab_size = self._cache.shape.vocab_size
        scorer = PromptScorer.of(chunks, self._scored_rows, vocab_size)
        drafts = DraftLogits(due, self._sampler) if plan.has_drafts else None
        positions = [c.start + c.count - c.sequence.prompt_length for c in due]
        choose = before = None
        if after is not None:
            assert not isinstance(after.pending, Exception)
            before = after.pending
        if due and (after is None or not [s for s in sequences if s.constrained]):
            # Before the forward pass, so that masks are filled in meanwhile.
            choose = self._sampler.prepare(sequences, positions)
        layout = self._layout(plan, chunks, samples, () if after is None else after.sequences)
        pending = self._queue.launch(partial(self._compute, layout, before, scorer, drafts))
        step = Step(plan, pending, sequences, positions, not due, scorer, drafts)
        if choose is not None:
            pending.sample(choose)
            step.sampled = True
        return step

    def sample(self, step: Step) -> None:
        """Starts sampling for a step that has not begun to; the step before it was delivered."""
        if not step.sampled and not isinstance(step.pending, Exception):
            step.sampled = True
            step.pending.sample(self._sampler.prepare(step.sequences, step.positions))

    def forget(self) -> None:
        """Drops all references to sequences: after a failed step, or when idle."""
        self._sampler.forget()
        self._tables.forget()

    def _compute(
        self,
        layout: _Layout,
        before: Pending | None,
        scorer: PromptScorer | None,
        drafts: DraftLogits | None,
    ) -> torch.Tensor:
        """Runs on the device; reads nothing that the host may have changed since the launch."""
        numbers: tuple[Uploaded, ...] = (
            layout.ids,
            layout.positions,
            layout.logits_rows,
            layout.unknown,
            layout.rows_before,
            layout.tables.cells,
            *layout.tables.blocks,
            *layout.slots,
            *([] if isinstance(layout.tables.rows, slice) else [layout.tables.rows]),
        )
        ids, positions, rows, unknown, rows_before, cells, *others = upload(numbers, self._device)
        groups = len(layout.slots)
        blocks, slots, moved = others[:groups], others[groups : 2 * groups], others[2 * groups :]
        tables = self._tables.update(layout.tables, cells, blocks, moved[0] if moved else None)
        places = tuple(Places(*each) for each in zip(tables, slots, strict=True))
        if before is not None and len(layout.unknown):
            ids = ids.index_copy_(0, unknown, before.token_ids.index_select(0, rows_before))
        batch = RaggedBatch(
            token_ids=ids,
            positions=positions,
            query_lengths=layout.query_lengths,
            context_lengths=layout.context_lengths,
            places=places,
            logits_rows=rows,
            read_logits=None if scorer is None else partial(self._score, scorer),
        )
        logits = self._model.forward(batch, self._cache)
        return logits if drafts is None else drafts.keep(logits)

    def _score(
        self, scorer: PromptScorer, logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        # After the layers, whose memory is planned without these arrays.
        rows, targets = upload((scorer.rows, scorer.targets), self._device)
        scorer.score(rows, targets, logits_of)

    def _in_order(self, plan: StepPlan) -> Items[Chunk]:
        """Those of one row first, and then as their sequences have rows in the tables, which need
        not be copied for a step in this order."""
        chunks = plan.chunks
        places = self._tables.rows_of([chunk.sequence for chunk in chunks])
        if plan.rows > len(chunks):
            behind = max(places) + 1
            places = [
                row + behind * (chunk.rows > 1) for chunk, row in zip(chunks, places, strict=True)
            ]
        if places == sorted(places):
            return chunks
        return [chunks[i] for i in sorted(range(len(places)), key=places.__getitem__)]

    def _layout(
        self,
        plan: StepPlan,
        chunks: Items[Chunk],
        samples: list[bool],
        before: tuple[Sequence, ...],
    ) -> _Layout:
        """``chunks`` of the ``plan`` in their order. ``before``: who is due a token of the step
        before, row by row, if these tokens are not known yet."""
        sequences = [chunk.sequence for chunk in chunks]
        starts = np.array([chunk.start for chunk in chunks])
        size = self._cache.block_size
        known = starts < np.array([len(sequence.token_ids) for sequence in sequences])
        if plan.rows == len(chunks):
            # One token for each sequence.
            lengths = (1,) * plan.rows
            query = np.ones(plan.rows, np.int64)
            ends = query.cumsum()
            ids = np.zeros(plan.rows, np.int64)
            have = np.flatnonzero(known).tolist()
            ids[have] = [sequences[i].token_ids[chunks[i].start] for i in have]
            positions = starts
            blocks = np.array([c.sequence.blocks[c.start // size] for c in chunks])
        else:
            lengths = tuple([chunk.rows for chunk in chunks])
            query = np.array(lengths)
            ends = query.cumsum()
            pieces = [
                [*c.sequence.token_ids[c.start : c.end], *c.drafts] if k else [0]
                for c, k in zip(chunks, known.tolist(), strict=True)
            ]
            ids = np.fromiter(chain.from_iterable(pieces), np.int64, int(ends[-1]))
            positions = np.arange(ids.size) + np.repeat(starts - (ends - query), query)
            blocks = np.concatenate([_blocks_of(chunk, size) for chunk in chunks])
        lacking = np.flatnonzero(~known)
        row_before = dict(zip(before, range(len(before)), strict=True))
        from_rows = [row_before[sequences[i]] for i in lacking.tolist()]
        of_groups = [blocks, *(window.partners[blocks] for window in self._cache.windows)]
        due = np.array(samples)
        if plan.has_drafts:
            # First a row for each sequence, then the rows of the drafts.
            drafts = np.array([len(chunk.drafts) for chunk in chunks])
            rows = np.concatenate([(ends - 1 - drafts)[due], *map(np.arange, ends - drafts, ends)])
        else:
            rows = (ends - 1)[due]
        return _Layout(
            ids=ids,
            positions=positions,
            logits_rows=rows,
            unknown=ends[lacking] - 1,
            rows_before=np.array(from_rows, np.int64),
            slots=tuple(each * size + positions % size for each in of_groups),
            tables=self._tables.lay_out(sequences),
            query_lengths=lengths,
            context_lengths=tuple((starts + query).tolist()),
        )


def _blocks_of(chunk: Chunk, block_size: int) -> Integers:
    """[chunk.rows]: the block of each token."""
    first, end = chunk.start // block_size, chunk.start + chunk.rows
    blocks = np.array(chunk.sequence.blocks[first : -(-end // block_size)])
    return blocks[np.arange(chunk.start, end) // block_size - first]


def upload(arrays: Items[Uploaded], device: torch.device) -> list[torch.Tensor]:
    """``arrays`` as tensors on ``device``; on the CPU they share the arrays' memory.

    Elsewhere they are views of one tensor, so that one copy moves them all, because a small copy
    costs the host about as much as a kernel launch. The host does not wait for a copy from pinned
    memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Items[Uploaded], *, pinned: bool) -> torch.Tensor:
    """The bytes of all numbers in one row, each array at an aligned offset."""
    whole = torch.zeros(sum(map(_room, arrays)), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    row, at = whole.numpy(), 0
    for numbers in arrays:
        row[at : at + numbers.nbytes] = numbers.ravel().view(np.uint8)
        at += _room(numbers)
    return whole


def unpack(whole: torch.Tensor, arrays: Items[Uploaded]) -> list[torch.Tensor]:
    """The arrays that ``pack`` packed, as views in their types and shapes."""
    views, at = [], 0
    for numbers in arrays:
        dtype = torch.from_numpy(numbers).dtype
        views.append(whole[at : at + numbers.nbytes].view(dtype).view(numbers.shape))
        at += _room(numbers)
    return views


def _room(array: Uploaded) -> int:
    return -(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
