"""One vectorised pass from logits to tokens for a batch of any mix of parameters.

Parameters apply in vLLM's order: logit_bias, min_tokens, penalties; then the grammar's mask; then,
for rows that are not greedy, temperature, min_p, top_k, top_p (see
:class:`~llorch_worker.kernels.TruncateRows`).

A random row takes the inverse of its cumulative distribution, in the vocabulary's order, at
``uniforms(seed, position)``. Every operation works on each row alone and truncation does not
reorder the vocabulary, so a row's token does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
import numpy as np
import torch
from torch.nn.functional import pad

from llorch_worker.contract.request import MAX_LOGPROBS
from llorch_worker.engine.sampling.batch import LogprobRows, RandomRows, SamplingBatch
from llorch_worker.engine.sampling.masks import MaskedRow, Masker, Masks
from llorch_worker.engine.sequence import Sequence
from llorch_worker.kernels import FusedSample, TruncateRows, torch_ops
from llorch_worker.kernels.uniforms import uniforms
from llorch_worker.kernels.upload import on_device

SEGMENT = 128
"""Tokens; near the square root of a vocabulary, so that both stages see about as many numbers."""


# A struct, because each step makes one for each row.
class RowLogprobs(msgspec.Struct, gc=False):
    """Log probabilities of one row under the model's own distribution. Nothing changes it."""

    chosen: float
    top_ids: list[int]
    top: list[float]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The step's tokens, one per row; ``damaged`` rows had NaN or infinite logits and have none."""

    token_ids: list[int]
    logprobs: dict[int, RowLogprobs]
    damaged: frozenset[int]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of the rows that request them: ``chosen`` [wanting], ``top`` and
    ``top_ids`` [wanting, most]."""

    wanting: LogprobRows
    chosen: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step's tokens, as the device has them.

    ``token_ids`` [rows] int64; ``peaks`` [rows] float32, the largest logit of each row, finite
    unless the row is damaged: NaN wins every maximum.
    """

    token_ids: torch.Tensor
    peaks: torch.Tensor
    logprobs: Logprobs | None

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> Chosen:
        """With a ``copy`` of each tensor."""
        probs = self.logprobs
        if probs is not None:
            parts = (probs.chosen, probs.top, probs.top_ids)
            probs = Logprobs(probs.wanting, *map(copy, parts))
        return Chosen(copy(self.token_ids), copy(self.peaks), probs)

    def read(self) -> Sampled:
        """Waits for the device."""
        damaged = frozenset(np.flatnonzero(~np.isfinite(self.peaks.numpy())).tolist())
        logprobs = {} if self.logprobs is None else _read_logprobs(self.logprobs)
        return Sampled(self.token_ids.tolist(), logprobs, damaged)


@dataclass(frozen=True, slots=True)
class _Draw:
    """What the host has prepared: the parameters of the rows, the positions of their next tokens
    within their choices, and the masks of the constrained rows."""

    batch: SamplingBatch
    positions: list[int]
    masks: Future[Masks] | None


class Sampler:
    """Chooses tokens. Its only state is the parameters of the current rows."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        fused: FusedSample | None = None,
        truncate_rows: TruncateRows | None = None,
    ) -> None:
        """``fused`` takes the tokens from the logits once they have their biases, penalties and
        masks. Without it torch's operations do. ``truncate_rows``, if given, takes the place of the
        plain form, which sorts the vocabulary and would dominate sampling."""
        self._device = device
        self._fused = fused
        self._truncate_rows = truncate_rows or torch_ops.truncate_rows
        self._vocab_size = vocab_size
        self._batch: SamplingBatch | None = None
        self._next_positions: list[int] = []
        # [most random rows so far, vocab] float32; reused to avoid the page faults of new memory.
        self._weights = torch.empty(0, vocab_size, device=device)

    def sample(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> Sampled:
        """The next token of each sequence.

        Args:
            logits: [rows, vocab] float32, the model's own; overwritten.
            sequences: one for each row.
        """
        positions = [sequence.generated_count for sequence in sequences]
        return self.prepare(sequences, positions)(logits).read()

    def prepare(
        self, sequences: Rows[Sequence], positions: list[int]
    ) -> Callable[[torch.Tensor], Chosen]:
        """The host's part: tokens are due at ``positions`` of the choices of ``sequences``.

        The device's part is the returned function: the tokens for ``logits`` as in :meth:`sample`.
        It reads nothing of the host but masks, and never makes it wait for the device. Those of
        several steps run in the order in which they were prepared. Only the device need know the
        last token of a sequence, if it has no mask and the step before chose it.
        """
        rows = tuple(sequences)
        batch = self._batch
        if batch is None or not batch.is_of(rows) or self._next_positions != positions:
            goes_on = self._goes_on(rows, positions)
            batch = SamplingBatch(rows, self._vocab_size, self._device, batch, goes_on)
            self._batch = batch
        self._next_positions = [position + 1 for position in positions]
        masks = self._begin_masks(batch, positions)
        return partial(self._choose, _Draw(batch, positions, masks))

    def _goes_on(self, sequences: Rows[Sequence], positions: list[int]) -> dict[int, int]:
        """Which rows continue which of the batch before. After a gap in the positions a token that
        was counted is none of the text."""
        if self._batch is None:
            return {}
        due = zip(self._batch.sequences, self._next_positions, strict=True)
        known = {each: (row, position) for row, (each, position) in enumerate(due)}
        return {
            row: known[sequence][0]
            for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True))
            if sequence in known and known[sequence][1] == position
        }

    def _choose(self, draw: _Draw, logits: torch.Tensor) -> Chosen:
        batch = draw.batch
        peaks = logits.amax(dim=-1)
        raw = None
        if (wanting := batch.logprob_rows) is not None:
            raw = (logits if wanting.rows is None else logits[wanting.rows]).log_softmax(dim=-1)
        positions = on_device(draw.positions, torch.int64, self._device)
        _shape_logits(logits, draw, positions)
        if self._fused is not None:
            chosen = self._fused(logits, batch.sampled_rows, positions)
        else:
            chosen = self._take(logits, batch.random, positions)
        if batch.penalties is not None:
            batch.penalties.count(chosen)
        logprobs = None
        if raw is not None and wanting is not None:
            logprobs = _logprobs(raw, chosen, wanting)
        return Chosen(chosen, peaks, logprobs)

    def _begin_masks(self, batch: SamplingBatch, positions: list[int]) -> Future[Masks] | None:
        """Masks are filled in while the model computes the logits."""
        masked = [
            MaskedRow(
                row, matcher, sequence.stop_ids, positions[row] >= sequence.request.min_tokens
            )
            for row in batch.constrained
            # A token that is discarded needs none.
            if positions[row] == (sequence := batch.sequences[row]).generated_count
            if sequence.finish_reason is None and (matcher := sequence.matcher) is not None
        ]
        return self._masker.begin(masked) if masked else None

    @cached_property
    def _masker(self) -> Masker:
        return Masker(self._vocab_size, self._device)

    def forget(self) -> None:
        """Drops the current rows: after a failed step, or when nothing runs."""
        self._batch = None

    def _take(
        self, logits: torch.Tensor, random: RandomRows | None, positions: torch.Tensor
    ) -> torch.Tensor:
        """[rows] int64."""
        if random is None:
            return likeliest(logits)
        if random.rows is None:
            return self._draw(logits, random, positions)
        chosen = likeliest(logits)
        chosen[random.rows] = self._draw(logits[random.rows], random, positions[random.rows])
        return chosen

    def _draw(
        self, logits: torch.Tensor, random: RandomRows, positions: torch.Tensor
    ) -> torch.Tensor:
        """A token for each random row; [random] int64.

        Args:
            logits: [random, vocab] float32; overwritten.
            positions: [random] int64.
        """
        scaled = logits.div_(random.temperatures)
        if len(scaled) > len(self._weights):
            self._weights = torch.empty_like(scaled)
        weights = torch.softmax(scaled, dim=-1, out=self._weights[: len(scaled)])
        if (truncation := random.truncation) is not None:
            limits = truncation.log_min_p, truncation.top_k, truncation.top_p
            self._truncate_rows(weights, scaled, truncation.rows, *limits)
        return inverse_cumulative(weights, uniforms(random.seeds, positions))


def _logprobs(raw: torch.Tensor, chosen: torch.Tensor, wanting: LogprobRows) -> Logprobs:
    """raw: [wanting, vocab] float32 log-softmax of the model's own logits."""
    tokens = chosen if wanting.rows is None else chosen[wanting.rows]
    of_chosen = raw.gather(1, tokens.unsqueeze(1)).squeeze(1)
    # As many for one row as for another: which one of equal logits comes first depends on it.
    most = min(MAX_LOGPROBS, raw.shape[-1]) if any(wanting.tops) else 0
    values, ids = raw.topk(most, dim=-1)
    return Logprobs(wanting, of_chosen, values, ids)


def _read_logprobs(logprobs: Logprobs) -> dict[int, RowLogprobs]:
    """Log probabilities by row."""
    wanting = logprobs.wanting
    ids, values = logprobs.top_ids.tolist(), logprobs.top.tolist()
    if min(wanting.tops) < logprobs.top.shape[1]:
        ids = [each[:top] for each, top in zip(ids, wanting.tops, strict=True)]
        values = [each[:top] for each, top in zip(values, wanting.tops, strict=True)]
    rows = map(RowLogprobs, logprobs.chosen.tolist(), ids, values)
    return dict(zip(wanting.numbers, rows, strict=True))


def _shape_logits(logits: torch.Tensor, draw: _Draw, positions: torch.Tensor) -> None:
    """Applies logit_bias, min_tokens, penalties and masks, to greedy rows too, in place."""
    batch = draw.batch
    if batch.biases is not None:
        logits.view(-1).index_add_(0, batch.biases.cells, batch.biases.values)
    suppressed = batch.suppressions
    if suppressed is not None and min(draw.positions) < suppressed.longest:
        short = positions[suppressed.rows] < suppressed.until
        cells, flat = suppressed.cells, logits.view(-1)
        flat.index_copy_(0, cells, flat[cells].masked_fill(short, -torch.inf))
    if batch.penalties is not None:
        batch.penalties.take_over()
        batch.penalties.apply(logits)
    if draw.masks is not None:
        draw.masks.result().apply(logits)


# Both search a vocabulary in two stages: first the segment of a row, then the place in it. One pass
# reduces each segment to one number; slow or float64 operations then see few numbers.


def likeliest(values: torch.Tensor) -> torch.Tensor:
    """[rows] int64, the first of the largest values of each row; values: [rows, vocab] float32."""
    segments = _segments(values, -torch.inf)
    chosen = segments.amax(dim=-1).argmax(dim=-1)
    return _within(segments, chosen).argmax(dim=-1) + chosen * SEGMENT


def inverse_cumulative(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token at which each row's cumulative weight, in vocabulary order, exceeds a share.

    A token of weight 0 is never chosen, unless the row has NaN.

    Args:
        weights: [rows, vocab] float32, none negative, at least one positive.
        uniforms: [rows] float64 in [0, 1), shares of the row's total.

    Returns:
        [rows] int64.
    """
    segments = _segments(weights, 0)
    sums = segments.sum(dim=-1)
    cumulative = _cumulative(sums)
    targets = uniforms.unsqueeze(1) * cumulative[:, -1:]
    # right=True: the first whose cumulative weight exceeds the target, so never one of weight 0.
    chosen = torch.searchsorted(cumulative, targets, right=True).clamp_(max=sums.shape[-1] - 1)
    weight = sums.gather(1, chosen)
    share = (targets - cumulative.gather(1, chosen) + weight).div_(weight)
    inside = _cumulative(_within(segments, chosen.squeeze(1)))
    total = inside[:, -1:]
    # Rounding must not leave the segment at either end.
    targets = torch.minimum(share.clamp_(min=0) * total, torch.nextafter(total, total - total))
    tokens = chosen * SEGMENT + torch.searchsorted(inside, targets, right=True)
    tokens = tokens.clamp_(max=weights.shape[-1] - 1)  # NaN is found beyond the end
    if not weights.is_cpu:
        # A parallel prefix sum (CUDA) may step by a rounding error at a token of weight 0.
        possible = weights.gather(1, tokens) > 0
        tokens = torch.where(possible, tokens, likeliest(weights).unsqueeze(1))
    return tokens.squeeze(1)


def _cumulative(weights: torch.Tensor) -> torch.Tensor:
    # In float32 a sum over the whole vocabulary would round unlikely tokens away; a sum over one
    # segment errs as little as the weights themselves.
    return weights.cumsum(dim=-1, dtype=torch.float64)


def _segments(values: torch.Tensor, filler: float) -> torch.Tensor:
    """[rows, segments, SEGMENT]; ``filler`` completes the last segment."""
    missing = -values.shape[-1] % SEGMENT
    if missing:
        values = pad(values, (0, missing), value=filler)
    return values.reshape(len(values), -1, SEGMENT)


def _within(segments: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[rows, SEGMENT]: the ``chosen`` [rows] int64 segment of each row."""
    return segments[torch.arange(len(segments), device=segments.device), chosen]
