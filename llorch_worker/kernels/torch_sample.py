"""Greedy tokens, and draws without top_k and top_p, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

FusedSample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""What ``sample`` is, here and as a kernel."""


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    log_min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """One token a row: the first whose cumulative probability exceeds ``uniforms``.

    Args:
        logits: [rows, vocab] float32; untouched.
        temperatures: [rows] float32; 0 takes the row's first maximum.
        log_min_p: [rows] float32; tokens less likely than the likeliest times min_p are not drawn;
            -inf draws from all.
        uniforms: [rows] float64 in [0, 1).

    Returns:
        [rows] int64.
    """
    best, likeliest = logits.max(dim=-1, keepdim=True)
    greedy = (temperatures == 0).unsqueeze(1)
    scaled = (logits - best) / temperatures.unsqueeze(1).masked_fill(greedy, 1.0)
    weights = torch.where(scaled >= log_min_p.unsqueeze(1), scaled.exp(), 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    passed = (cumulative > uniforms.unsqueeze(1) * cumulative[:, -1:]) & (weights > 0)
    drawn = torch.where(
        passed.any(-1, keepdim=True), passed.int().argmax(-1, keepdim=True), likeliest
    )
    return torch.where(greedy, likeliest, drawn).squeeze(1)
