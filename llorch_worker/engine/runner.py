"""One step on the device: scheduled chunks in, sampled tokens out."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.cache import Places, UnifiedCache
from llorch_worker.engine.device.queue import DeviceQueue, Pending, device_queue
from llorch_worker.engine.draft_logits import DraftLogits
from llorch_worker.engine.prompt_logprobs import ScoredTokens
from llorch_worker.engine.prompt_scorer import PromptScorer
from llorch_worker.engine.sampling.sampler import Chosen, Draw, Sampled, Sampler
from llorch_worker.engine.sequence import Sequence
from llorch_worker.engine.step_plan import Chunk
from llorch_worker.model import ForwardModel, RaggedBatch

Integers = npt.NDArray[np.int64]

_ALIGNED = 2
"""Integers in the 16 bytes that kernels load at once; uploaded arrays begin at multiples of it."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sequences that were due a token, and the samples for them, row by row; and the prompts
    whose tokens were scored."""

    sequences: tuple[Sequence, ...]
    sampled: Sampled
    scored: list[tuple[Sequence, ScoredTokens]]
    drafts: DraftLogits | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A step on the device: the sequences that are due a token, and their future tokens."""

    sequences: tuple[Sequence, ...]
    pending: Pending
    scorer: PromptScorer | None
    drafts: DraftLogits | None

    def read(self) -> StepOutput:
        """Waits until the step is done. Raises what it raised."""
        sampled = self.pending.read()
        scored = [] if self.scorer is None else self.scorer.read()
        return StepOutput(self.sequences, sampled, scored, self.drafts)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A step's arrays as the host lays them out.

    ``ids`` are token ids, or rows of the previous step whose tokens only the device knows.
    """

    ids: Integers
    positions: Integers
    logits_rows: Integers
    places: tuple[tuple[Integers, Integers], ...]
    """Block tables and slots of each group of layers."""
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

    @property
    def overlaps(self) -> bool:
        """See ``DeviceQueue``."""
        return self._queue.overlaps

    def launch(self, chunks: Items[Chunk], after: Launch | None = None) -> Launch:
        """Starts computing the chunks, and sampling for those that reach the last known token.

        With ``after``, each chunk is the token that this earlier step chooses for its sequence.
        """
        chunks = sorted(chunks, key=lambda chunk: chunk.rows > 1)
        due = [chunk for chunk in chunks if chunk.samples]
        sequences = tuple(chunk.sequence for chunk in due)
        draw = None
        if due:
            places = [c.start + c.count - c.sequence.prompt_length for c in due]
            draw = self._sampler.prepare(sequences, places)
        vocab_size = self._cache.shape.vocab_size
        scorer = PromptScorer.of(chunks, self._scored_rows, vocab_size)
        drafts = DraftLogits.of(due, self._sampler)
        layout = self._layout(chunks, after)
        before = None if after is None else after.pending
        work = partial(self._compute, layout, before, draw, scorer, drafts)
        return Launch(sequences, self._queue.launch(work), scorer, drafts)

    def forget(self) -> None:
        """Drops all references to sequences: after a failed step, or when idle."""
        self._sampler.forget()

    def _compute(
        self,
        layout: _Layout,
        before: Pending | None,
        draw: Draw | None,
        scorer: PromptScorer | None,
        drafts: DraftLogits | None,
    ) -> Chosen | None:
        """Runs on the device; reads nothing that the host may have changed since the launch."""
        numbers = (layout.ids, layout.positions, layout.logits_rows, *chain(*layout.places))
        ids, positions, rows, tables, slots, *windowed = upload(numbers, self._device)
        batch = RaggedBatch(
            token_ids=ids if before is None else before.token_ids.index_select(0, ids),
            positions=positions,
            query_lengths=layout.query_lengths,
            context_lengths=layout.context_lengths,
            block_tables=tables,
            slots=slots,
            windowed=tuple(map(Places, windowed[::2], windowed[1::2])),
            logits_rows=rows,
            read_logits=None if scorer is None else partial(self._score, scorer),
        )
        logits = self._model.forward(batch, self._cache)
        if drafts is not None:
            logits = drafts.keep(logits)
        return None if draw is None else self._sampler.choose(logits, draw)

    def _score(
        self, scorer: PromptScorer, logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        # After the layers, whose memory is planned without these arrays.
        rows, targets = upload((scorer.rows, scorer.targets), self._device)
        scorer.score(rows, targets, logits_of)

    def _layout(self, chunks: Items[Chunk], after: Launch | None) -> _Layout:
        count = len(chunks)
        lengths = tuple(chunk.rows for chunk in chunks)
        starts = np.array([chunk.start for chunk in chunks])
        query = np.array(lengths)
        ends = query.cumsum()
        tables = _block_tables([chunk.sequence.blocks for chunk in chunks])
        if int(ends[-1]) == count:
            # Decodes only: one token per sequence.
            if after is None:
                ids = np.array([chunk.sequence.token_ids[chunk.start] for chunk in chunks])
            else:
                row_of = {sequence: row for row, sequence in enumerate(after.sequences)}
                ids = np.array([row_of[chunk.sequence] for chunk in chunks])
            owners, positions = np.arange(count), starts
        else:
            pieces = [
                [*c.sequence.token_ids[c.start : c.start + c.count], *c.drafts] for c in chunks
            ]
            ids = np.fromiter(chain.from_iterable(pieces), np.int64, int(ends[-1]))
            owners = np.repeat(np.arange(count), query)
            positions = np.arange(ids.size) + np.repeat(starts - (ends - query), query)
        size = self._cache.block_size
        columns, offsets = positions // size, positions % size
        of_groups = [tables, *(window.partners[tables] for window in self._cache.windows)]
        due = np.array([chunk.samples for chunk in chunks])
        # First a row for each sequence, then the rows of the drafts.
        drafts = np.array([len(chunk.drafts) for chunk in chunks])
        rows = (ends - 1 - drafts)[due]
        if drafts.any():
            rows = np.concatenate([rows, *map(np.arange, ends - drafts, ends)])
        return _Layout(
            ids=ids,
            positions=positions,
            logits_rows=rows,
            places=tuple((t, t[owners, columns] * size + offsets) for t in of_groups),
            query_lengths=lengths,
            context_lengths=tuple((starts + query).tolist()),
        )


def _block_tables(lists: Items[array[int]]) -> Integers:
    """[sequences, widest] int64: the block ids of each sequence, padded with 0, in aligned rows."""
    tables = np.zeros((len(lists), _aligned(max(map(len, lists)))), np.int64)
    for row, blocks in enumerate(lists):
        tables[row, : len(blocks)] = blocks
    return tables


def upload(arrays: Items[Integers], device: torch.device) -> list[torch.Tensor]:
    """``arrays`` as int64 tensors on ``device``; on the CPU they share the arrays' memory.

    Elsewhere they are views of one tensor, so that one copy moves them all, because a small copy
    costs the host about as much as a kernel launch. The host does not wait for a copy from pinned
    memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array.astype(np.int64, copy=False)) for array in arrays]
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Items[Integers], *, pinned: bool) -> torch.Tensor:
    """All numbers in one row, each array at an aligned offset."""
    whole = torch.zeros(sum(map(_room, arrays)), dtype=torch.int64, device="cpu", pin_memory=pinned)
    row, at = whole.numpy(), 0
    for numbers in arrays:
        row[at : at + numbers.size] = numbers.ravel()
        at += _room(numbers)
    return whole


def unpack(whole: torch.Tensor, arrays: Items[Integers]) -> list[torch.Tensor]:
    """The arrays that ``pack`` packed, as views in their shapes."""
    views, at = [], 0
    for numbers in arrays:
        views.append(whole[at : at + numbers.size].view(numbers.shape))
        at += _room(numbers)
    return views


def _room(array: Integers) -> int:
    return _aligned(array.size)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
