"""The layer's large matrices (QKV with RoPE, and SwiGLU), RoPE alone, and the norm before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benches.components import reference
from benches.components.sizes import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    ROPE_THETA,
    KnownLinear,
    cache,
    check,
    linear,
    randoms,
)
from llorch_worker.cache import Rope, RopeTables
from llorch_worker.kernels import Ops
from llorch_worker.kernels.torch_ops import apply_rope
from llorch_worker.model.block import GatedMlp, RmsNorm

TOKENS = [1, 8, 32, 128]


@pytest.fixture(scope="module")
def qkv(dtype: torch.dtype) -> KnownLinear:
    return linear(3 * HIDDEN, HIDDEN, dtype)


@pytest.fixture(scope="module")
def swiglu(dtype: torch.dtype, ops: Ops) -> GatedMlp:
    return GatedMlp(
        linear(2 * INTERMEDIATE, HIDDEN, dtype),
        linear(HIDDEN, INTERMEDIATE, dtype, seed=2),
        ops.silu_and_mul,
    )


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.benchmark(group="qkv_projection")
def test_qkv_projection(
    benchmark: Any, dtype: torch.dtype, ops: Ops, qkv: KnownLinear, tokens: int
) -> None:
    """The QKV product with RoPE and the write of new keys and values to the cache."""
    x = randoms(tokens, HIDDEN, dtype=dtype)
    positions = torch.arange(tokens)
    store = cache(dtype)
    kv = store.kv.layers[0]
    ((cos, sin),) = store.rope.at(positions)

    def project() -> torch.Tensor:
        heads = qkv(x).view(tokens, 3 * HEADS, HEAD_DIM)
        ops.rope_and_write(heads, cos, sin, positions, kv)
        return heads

    q = project()[:, :HEADS]
    plain = reference.matmul(x, qkv.weight).view(tokens, 3, HEADS, HEAD_DIM)
    check(q, reference.rope(plain[:, 0], positions), dtype)
    check(kv.keys.flatten(0, 1)[:tokens], reference.rope(plain[:, 1], positions), dtype)
    check(kv.values.flatten(0, 1)[:tokens], plain[:, 2], dtype)
    benchmark(project)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.benchmark(group="rope_forward")
def test_rope_forward(benchmark: Any, dtype: torch.dtype, tokens: int) -> None:
    """The queries and keys of one layer."""
    ropes = (Rope(ROPE_THETA),)
    tables = RopeTables(ropes, head_dim=HEAD_DIM, max_context=256, device=torch.device("cpu"))
    x = randoms(tokens, 2 * HEADS, HEAD_DIM, dtype=dtype)
    positions = torch.arange(100, 100 + tokens)
    ((cos, sin),) = tables.at(positions)
    check(apply_rope(x, cos, sin), reference.rope(x, positions), dtype)
    benchmark(apply_rope, x, cos, sin)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.benchmark(group="swiglu")
def test_swiglu(benchmark: Any, dtype: torch.dtype, swiglu: GatedMlp, tokens: int) -> None:
    x = randoms(tokens, HIDDEN, dtype=dtype)
    gate, up = reference.matmul(x, swiglu.gate_up.weight).chunk(2, dim=-1)  # type: ignore[attr-defined]
    inner = gate * torch.sigmoid(gate) * up
    check(swiglu(x), reference.matmul(inner, swiglu.down.weight), dtype)  # type: ignore[attr-defined]
    benchmark(swiglu, x)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.benchmark(group="rms_norm")
def test_rms_norm(benchmark: Any, dtype: torch.dtype, ops: Ops, tokens: int) -> None:
    norm = RmsNorm(randoms(HIDDEN, dtype=dtype, seed=3), 1e-5, ops)
    x = randoms(tokens, HIDDEN, dtype=dtype, spread=5)
    check(norm(x), reference.rms_norm(x, norm.weight, norm.eps), dtype)
    benchmark(norm, x)
