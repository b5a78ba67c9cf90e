"""Rotary position embedding in the half-split layout (arXiv 2104.09864)."""

from __future__ import annotations

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs (i, i + head_dim / 2) by their token's angle.

    ``x``: [tokens, heads, head_dim]; ``cos``, ``sin``: [tokens, 1, head_dim / 2] float32.
    Computed in float32, returned in ``x``'s dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
