"""A matrix product that rounds a row the same however many rows there are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS = {"cpu": 16, "cuda": 64}
"""Rows of every product by device. Fewer make a lone decode cheaper, more a prefill."""


def fixed_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x: [tokens, in]`` times the transpose of ``weight: [out, in]``: [tokens, out].

    Every product has the same shape, because libraries choose the order of a sum by the shape.
    """
    tokens, size = len(x), ROWS[x.device.type]
    if tokens % size:
        x = F.pad(x, (0, 0, 0, -tokens % size))
    transposed = weight.t()
    if len(x) == size:
        return torch.mm(x, transposed)[:tokens]
    out = x.new_empty(len(x), len(weight))
    for first in range(0, len(x), size):
        rows = slice(first, first + size)
        torch.mm(x[rows], transposed, out=out[rows])
    return out[:tokens]
