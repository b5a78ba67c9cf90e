"""Reference implementations as in the papers: one line per formula, float64, no cache."""

from __future__ import annotations

import torch

from benches.components.sizes import HEAD_DIM, ROPE_THETA


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoFormer's rotation of pairs (i, i + d/2); ``x``: [tokens, heads, head_dim]."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angles = positions.double()[:, None, None] * frequencies
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens of a context.

    ``q``: [queries, heads, head_dim]; ``k``, ``v``: [context, heads, head_dim]. Returns [queries,
    heads * head_dim].
    """
    queries, context = len(q), len(k)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / HEAD_DIM**0.5
    seen = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.double()).reshape(queries, -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T
