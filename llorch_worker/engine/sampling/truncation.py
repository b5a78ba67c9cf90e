"""min_p, top_k and top_p: which tokens of each row may still be drawn.

Each rule keeps the tokens at or above a threshold, ties included, so that no result depends on the
order of a sort. Thresholds are compared with the scaled logits, which are exact. A softmax may
round neighbouring logits to the same weight.

:func:`truncate_by_sorting` is the plain form, for any device. On the CPU a sort of the vocabulary
would dominate sampling, so NumPy, or the native kernel, finds the thresholds without one:
``pytest benches/components/bench_sampler.py`` times the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from llorch_worker.kernels import TruncateRows

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Sums = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

_SEGMENT = 128
_SLACK = 0.99
"""Lowers a bound on float32 weights, whose exponentials have rounding errors."""
_FEW = 256
"""Up to this many values are sorted; more are counted."""
_DIGITS = ((21, 2048), (10, 2048), (0, 1024))
"""Shift and number of values of each of the digits that make up 32 bits."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """min_p, top_k and top_p of the random rows that use one of them.

    ``rows`` [truncated] int64 index into the random rows, or None for all of them; ``log_min_p``
    [truncated, 1] float32, -inf when off; ``top_k`` [truncated, 1] int64, the vocabulary's size
    when off; ``top_p`` [truncated, 1] float64, inf when off.
    """

    rows: torch.Tensor | None
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


def truncate(
    weights: torch.Tensor,
    scaled: torch.Tensor,
    truncation: Truncation,
    truncate_rows: TruncateRows | None = None,
) -> None:
    """Sets the ``weights`` of the excluded tokens to 0.

    Args:
        weights: [random, vocab] float32, the probabilities of all tokens; changed in place.
        scaled: [random, vocab] float32, logits over temperature.
        truncate_rows: the native kernel, if there is one.
    """
    rows = truncation.rows
    if truncate_rows is not None:
        columns = (truncation.log_min_p, truncation.top_k, truncation.top_p)
        truncate_rows(weights, scaled, rows, *(column.squeeze(1) for column in columns))
    elif weights.is_cpu:
        _truncate_one_by_one(weights, scaled, truncation)
    else:
        truncate_by_sorting(weights, scaled, truncation)


def truncate_by_sorting(
    weights: torch.Tensor, scaled: torch.Tensor, truncation: Truncation
) -> None:
    """All truncated rows at once; both tensors are [random, vocab] float32."""
    if (rows := truncation.rows) is not None:
        truncated = weights[rows]
        truncate_by_sorting(truncated, scaled[rows], replace(truncation, rows=None))
        weights[rows] = truncated
        return
    falling, order = scaled.sort(dim=-1, descending=True)
    inside = torch.arange(falling.shape[-1], device=falling.device) < truncation.top_k
    # Equivalent to p >= min_p * p_max.
    inside &= falling >= falling[:, :1] + truncation.log_min_p
    masses = weights.gather(1, order).to(torch.float64).mul_(inside)
    cumulative = masses.cumsum(dim=-1)
    before = cumulative.roll(1, dims=-1)
    before[:, 0] = 0  # the likeliest token always stays
    inside &= before < truncation.top_p * cumulative[:, -1:]
    kept = inside.sum(dim=-1, keepdim=True).clamp_(min=1)
    weights.mul_(scaled >= falling.gather(1, kept - 1))


def _truncate_one_by_one(
    weights: torch.Tensor, scaled: torch.Tensor, truncation: Truncation
) -> None:
    rows = range(len(weights)) if truncation.rows is None else truncation.rows.tolist()
    weight_rows, value_rows = weights.numpy(), scaled.numpy()
    for row, log_min_p, top_k, top_p in zip(
        rows,
        truncation.log_min_p.squeeze(1).numpy(),
        truncation.top_k.squeeze(1).tolist(),
        truncation.top_p.squeeze(1).tolist(),
        strict=True,
    ):
        _truncate_row(weight_rows[row], value_rows[row], log_min_p, top_k, top_p)


def _truncate_row(
    weights: Floats, scaled: Floats, log_min_p: np.float32, top_k: int, top_p: float
) -> None:
    """One row without sorting it: bounds leave few candidates, and a histogram finds the threshold.

    weights, scaled: [vocab]. A row with NaN stays as it is.
    """
    if np.isnan(weights[0]):
        return
    floor = float(scaled.max() + log_min_p)
    if top_k < len(scaled):
        floor = max(floor, _kth_largest(scaled, top_k))
    if top_p < 1:
        kept, values = weights, scaled
        if floor > -np.inf:
            inside = np.flatnonzero(scaled >= floor)
            kept, values = weights.take(inside), scaled.take(inside)
        mass = float(kept.sum())
        if len(kept) > top_k:
            # top_p is a share of exactly top_k tokens: ties beyond them do not count.
            mass -= (len(kept) - top_k) * float(kept[values.argmin()])
        # The tokens below this bound together weigh less than what top_p leaves out.
        heavy = np.flatnonzero(kept >= _SLACK * (1 - top_p) * mass / len(kept))
        floor = max(floor, _floor_reaching(values.take(heavy), kept.take(heavy), top_p * mass))
    weights *= scaled >= floor


def _kth_largest(values: Floats, k: int) -> float:
    whole = len(values) // _SEGMENT * _SEGMENT
    maxima = values[:whole].reshape(-1, _SEGMENT).max(axis=1)
    if k <= len(maxima):
        # k segments have a value at least as large as the k-th largest of their maxima.
        values = values[values >= np.partition(maxima, -k)[-k]]
    return float(np.partition(values, -k)[-k])


def _floor_reaching(values: Floats, weights: Floats, target: float) -> float:
    """The largest value such that the weights at and above it reach ``target``."""
    bits = values.view(np.int32)
    # Keys sort as the values do: the bits of negative floats sort in reverse.
    keys = (bits ^ (bits >> 31 | np.int32(-(2**31)))).view(np.uint32)
    for shift, bins in _DIGITS:
        if len(values) <= _FEW:
            break
        digits = (keys >> shift) & (bins - 1)
        falling = np.bincount(digits, weights, bins)[::-1].cumsum()
        place = _place(falling, target)
        if place:
            target -= falling[place - 1]
        members = np.flatnonzero(digits == bins - 1 - place)
        keys, values, weights = keys.take(members), values.take(members), weights.take(members)
    order = (-values).argsort()
    falling = weights[order].cumsum(dtype=np.float64)
    return float(values[order[_place(falling, target)]])


def _place(cumulative: Sums, target: float) -> int:
    """The first place that reaches ``target``."""
    # Sums in another order may miss their own total by a rounding error.
    return int(cumulative.searchsorted(min(target, cumulative[-1])))
