"""Llama-2-7B's sizes, and what random inputs of them look like."""

from __future__ import annotations

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.weights import DenseLinear

HIDDEN = 4096
HEADS = 32
HEAD_DIM = 128
INTERMEDIATE = 11008
VOCAB = 32000
CONTEXT_TOKENS = 2048
BLOCK_TOKENS = 16
ROPE_THETA = 10000.0

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""Largest difference from the reference, as a share of the reference's largest value."""


def randoms(*shape: int, dtype: torch.dtype, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Normal random values of standard deviation ``spread``."""
    chance = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=chance) * spread).to(dtype)


def linear(out_features: int, in_features: int, dtype: torch.dtype, seed: int = 1) -> DenseLinear:
    """A layer that keeps the size of what goes through it."""
    return DenseLinear(
        randoms(out_features, in_features, dtype=dtype, spread=in_features**-0.5, seed=seed)
    )


def cache(dtype: torch.dtype, context_tokens: int = CONTEXT_TOKENS) -> UnifiedCache:
    """Of one layer, as the engine makes it."""
    return UnifiedCache.allocate(
        num_layers=1,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        rope_theta=ROPE_THETA,
        rope_scaling=None,
        max_context=context_tokens,
        num_blocks=-(-context_tokens // BLOCK_TOKENS),
        block_size=BLOCK_TOKENS,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def check(result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises unless ``result`` is the ``reference`` but for rounding in ``dtype``."""
    assert result.shape == reference.shape
    assert result.dtype == dtype
    difference = (result.double() - reference).abs().max()
    assert float(difference) <= TOLERANCES[dtype] * float(reference.abs().max())
