"""Searches of a whole vocabulary in two stages: first the segment of a row, then the place in it.

One pass reduces each segment to one number; slow or float64 operations then see few numbers.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

SEGMENT = 128
"""Tokens; near the square root of a vocabulary, so that both stages see about as many numbers."""


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
