"""Llama-2-7B's sizes, and random inputs of those sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llorch_worker.cache import CacheShape, Rope, UnifiedCache
from llorch_worker.kernels import find_native_kernels
from llorch_worker.kernels.arena import Arena
from llorch_worker.kernels.native.tiles import Bf16Tiles
from llorch_worker.weights import DenseLinear, Linear
from llorch_worker.weights.native_linear import NativeLinear

HIDDEN = 4096
HEADS = 32
HEAD_DIM = 128
INTERMEDIATE = 11008
VOCAB = 32000
CONTEXT_TOKENS = 2048
BLOCK_TOKENS = 16
ROPE_THETA = 10000.0

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""Largest allowed difference from the reference, as a share of the reference's largest value."""


def randoms(*shape: int, dtype: torch.dtype, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Normal random values of standard deviation ``spread``."""
    chance = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=chance) * spread).to(dtype)


def matrix(out_features: int, in_features: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """A matrix [out, in] whose products have the magnitude of their inputs."""
    return randoms(out_features, in_features, dtype=dtype, spread=in_features**-0.5, seed=seed)


@dataclass(frozen=True)
class KnownLinear:
    """The engine's layer for this machine and dtype, and the matrix that it was made from."""

    weight: torch.Tensor
    layer: Linear

    @property
    def weight_bytes(self) -> int:
        return self.layer.weight_bytes

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        return self.layer(x, wide=wide)


def linear(out_features: int, in_features: int, dtype: torch.dtype, seed: int = 1) -> KnownLinear:
    """A linear layer around ``matrix``."""
    weight = matrix(out_features, in_features, dtype, seed)
    native = find_native_kernels() if dtype is torch.bfloat16 else None
    if native is None:
        return KnownLinear(weight, DenseLinear(weight))
    tiles = Bf16Tiles.empty(Arena(), *weight.shape)
    tiles[:out_features] = weight
    packed = Bf16Tiles.pack_in_place(native, tiles, out_features)
    return KnownLinear(weight, NativeLinear((packed,)))


def cache(dtype: torch.dtype, context_tokens: int = CONTEXT_TOKENS) -> UnifiedCache:
    """The KV cache of one layer, as the engine allocates it."""
    return UnifiedCache.allocate(
        CacheShape(
            num_layers=1,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            ropes=(Rope(ROPE_THETA),),
            max_context=context_tokens,
            block_size=BLOCK_TOKENS,
            dtype=dtype,
            device=torch.device("cpu"),
        ),
        -(-context_tokens // BLOCK_TOKENS),
    )


def check(result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises unless ``result`` equals ``reference`` except for rounding in ``dtype``."""
    assert result.shape == reference.shape
    assert result.dtype == dtype
    difference = (result.double() - reference).abs().max()
    assert float(difference) <= TOLERANCES[dtype] * float(reference.abs().max())
