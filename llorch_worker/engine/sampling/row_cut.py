"""min_p, top_k and top_p of one row on the CPU, without sorting it.

A row of 32,000 takes 0.6 ms to sort, and how much of it a nucleus needs is not known beforehand: a
flat row's has thousands of tokens, a peaked one's three. Cheap bounds leave few candidates here,
and a histogram of their mass, digit by digit of the floats' own bits, finds the threshold exactly.
NumPy, because a row fits the processor's cache and its small operations cost a fifth of torch's.
"""

from __future__ import annotations

import numpy as np

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Sums = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Ids = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

_SEGMENT = 128
_SLACK = 0.99
"""On a bound of float32 numbers whose exponentials err by millionths."""
_FEW = 256
"""Values that are sorted faster than counted."""
_DIGITS = ((21, 2048), (10, 2048), (0, 1024))
"""Shift and number of values of each of the digits that make up 32 bits."""


def cut_row(
    weights: Floats, scaled: Floats, log_min_p: np.float32, top_k: int, top_p: float
) -> None:
    """Sets the weights of the tokens that fall to 0; a row with NaN stays as it is.

    Args:
        weights: [vocab], the probabilities before any cut; changed in place.
        scaled: [vocab], logits over temperature.
        log_min_p: -inf where off.
        top_k: the vocabulary's size where off.
        top_p: inf where off.
    """
    if np.isnan(weights[0]):
        return
    kept, values = weights, scaled
    tokens: Ids | None = None
    floor = float(scaled.max() + log_min_p)
    if top_k < len(scaled):
        floor = max(floor, _kth_largest(scaled, top_k))
    if floor > -np.inf:
        kept, values, tokens = _only(np.flatnonzero(scaled >= floor), weights, scaled, None)
    if top_p < 1:
        mass = float(kept.sum())
        if len(kept) > top_k:
            # top_p is a share of exactly top_k tokens: ties beyond them do not count.
            mass -= (len(kept) - top_k) * float(kept[values.argmin()])
        # The tokens below this bound together weigh less than what top_p leaves out.
        heavy = np.flatnonzero(kept >= _SLACK * (1 - top_p) * mass / len(kept))
        kept, values, tokens = _only(heavy, kept, values, tokens)
        inside = np.flatnonzero(values >= _floor_reaching(values, kept, top_p * mass))
        kept, values, tokens = _only(inside, kept, values, tokens)
    if tokens is None:
        return  # the k-th largest value is -inf already: nothing falls
    weights.fill(0)
    weights[tokens] = kept


def _only(
    chosen: Ids, weights: Floats, values: Floats, tokens: Ids | None
) -> tuple[Floats, Floats, Ids]:
    """``tokens`` None: all, in order."""
    kept = chosen if tokens is None else tokens.take(chosen)
    return weights.take(chosen), values.take(chosen), kept


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
    # In the order of the values: negative floats fall as their bits rise.
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
