"""Where the largest values of a row reach a given weight: a radix select, without any sort.

A sort of 32,000 values takes 40 times as long as the three histograms here, and no guess at the
number of candidates holds: a flat row's nucleus has thousands of tokens, a peaked one's three.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TOP_SHIFT, _TOP_BINS = 21, 2048
_LOWER_DIGITS = ((10, 2048), (0, 1024))
"""Shift and number of values of the digits into which 32 bits are split, after the top one."""


@dataclass(frozen=True, slots=True)
class Floors:
    """The smallest value that belongs, row by row.

    ``values`` [rows, 1] float32; ``tokens`` [rows, 1] int64: one token of that value; ``weights``
    [rows, 1] float64: of all tokens at or above it, ties included.
    """

    values: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor


def reach(values: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor) -> Floors:
    """Goes down each row's values until the weights passed reach the row's target.

    A target above the whole weight goes down to the last token of any weight. The sums of a row
    are taken in an order of its own, so they do not depend on the other rows.

    Args:
        values: [rows, vocab] float32. Where a row has NaN its floor is any value.
        weights: [rows, vocab] float64, none negative.
        targets: [rows, 1] float64, positive.
    """
    count = len(values)
    keys = _keys(values)
    digits = (keys >> _TOP_SHIFT).add_(_TOP_BINS // 2).to(torch.int64)
    histogram = weights.new_zeros(count, _TOP_BINS).scatter_add_(1, digits, weights)
    digit, passed, through = _digit_reaching(histogram, targets)
    # The members of each row's digit: from here on a flat list, mostly a small one.
    rows, tokens = (digits == digit).nonzero(as_tuple=True)
    keys, weights = keys[rows, tokens], weights[rows, tokens]
    for shift, bins in _LOWER_DIGITS:
        digits = ((keys >> shift) & (bins - 1)).to(torch.int64)
        histogram = weights.new_zeros(count * bins)
        histogram.scatter_add_(0, digits.add(rows, alpha=bins), weights)
        digit, before, through = _digit_reaching(histogram.view(count, bins), targets - passed)
        through, passed = passed + through, passed + before
        members = (digits == digit[rows, 0]).nonzero().squeeze(1)
        rows, tokens, keys, weights = (each[members] for each in (rows, tokens, keys, weights))
    chosen = torch.zeros(count, dtype=torch.int64, device=values.device)
    chosen[rows] = tokens
    chosen = chosen.unsqueeze(1)
    return Floors(values.gather(1, chosen), chosen, through)


def _keys(values: torch.Tensor) -> torch.Tensor:
    """int32 in the order of the float32 ``values``: negative floats fall as their bits rise."""
    bits = values.view(torch.int32)
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def _digit_reaching(
    histogram: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The digit, from the largest down, at which the weights reach ``targets`` [rows, 1].

    Returns the digits, and the weights of what lies above them, without and with them: [rows, 1].
    """
    falling = histogram.flip(-1).cumsum(-1)
    bins = falling.shape[-1]
    # Sums in another order may miss their own total by a rounding error.
    wanted = torch.minimum(targets, falling[:, -1:])
    place = torch.searchsorted(falling, wanted).clamp_(max=bins - 1)  # NaN lies beyond the end
    above = falling.gather(1, (place - 1).clamp_(min=0)).mul_(place > 0)
    return bins - 1 - place, above, falling.gather(1, place)
