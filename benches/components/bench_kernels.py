"""The native kernels against their torch twins, in bfloat16 at TinyLlama's sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benches.components.bench_attention import batch_of, sequences_of
from benches.components.sizes import BLOCK_TOKENS, randoms
from llorch_worker.cache import CausalMasks
from llorch_worker.kernels import PLAIN, LayerKV, Ops, TorchOps, choose_ops

HIDDEN, INTERMEDIATE = 2048, 5632
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 64
LAYERS = 22
"""This many caches take turns, so that keys and values come from memory as in a whole model."""
CPU = torch.device("cpu")
DTYPE = torch.bfloat16
TOKENS = [1, 16, 512]


@pytest.fixture(scope="module", params=["native", "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "torch":
        return TorchOps()
    chosen = choose_ops(CPU, DTYPE, head_dim=HEAD_DIM)
    if chosen.ops.name != "native":
        pytest.skip(chosen.reason)
    return chosen.ops


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.benchmark(group="kernels: add_rms_norm")
def test_add_rms_norm(benchmark: Any, ops: Ops, tokens: int) -> None:
    x, residual = (randoms(tokens, HIDDEN, dtype=DTYPE, seed=seed) for seed in (0, 1))
    weight = randoms(HIDDEN, dtype=DTYPE, seed=2)
    benchmark(ops.add_rms_norm, x, residual, weight, 1e-5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.benchmark(group="kernels: silu_and_mul")
def test_silu_and_mul(benchmark: Any, ops: Ops, tokens: int) -> None:
    benchmark(ops.silu_and_mul, randoms(tokens, 2 * INTERMEDIATE, dtype=DTYPE))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.benchmark(group="kernels: rope_and_write")
def test_rope_and_write(benchmark: Any, ops: Ops, tokens: int) -> None:
    qkv = randoms(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE)
    angles = torch.rand(tokens, HEAD_DIM // 2)
    slots, kv = torch.arange(tokens), caches(tokens)[0]
    benchmark(ops.rope_and_write, qkv, angles.cos(), angles.sin(), slots, kv)


@pytest.mark.parametrize("context_tokens", [128, 512, 2048])
@pytest.mark.parametrize("sequences", [1, 16])
@pytest.mark.benchmark(group="kernels: paged_decode, all layers")
def test_paged_decode(benchmark: Any, ops: Ops, sequences: int, context_tokens: int) -> None:
    batch = sequences_of(batch_of(sequences, 1, context_tokens))
    qkv = randoms(sequences, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE)
    layers, out = caches(sequences * context_tokens), torch.empty(sequences, HIDDEN, dtype=DTYPE)

    def step() -> None:
        attend = ops.paged_decode(batch)
        for kv in layers:
            attend(qkv, kv, out, PLAIN)

    benchmark(step)


@pytest.mark.parametrize(("tokens", "context_tokens"), [(512, 512), (16, 2048), (512, 2048)])
@pytest.mark.benchmark(group="kernels: paged_prefill")
def test_paged_prefill(benchmark: Any, ops: Ops, tokens: int, context_tokens: int) -> None:
    batch = sequences_of(batch_of(1, tokens, context_tokens))
    qkv = randoms(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE)
    mask = CausalMasks(max_query=tokens, max_context=context_tokens, device=CPU)
    attend = ops.paged_prefill(batch, mask)
    out = torch.empty(tokens, HIDDEN, dtype=DTYPE)
    benchmark(attend, qkv, caches(context_tokens)[0], out, PLAIN)


def caches(tokens: int) -> list[LayerKV]:
    """A cache per layer, full of finite values."""
    shape = (LAYERS, -(-tokens // BLOCK_TOKENS), BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    keys, values = (randoms(*shape, dtype=DTYPE, seed=seed) for seed in (0, 1))
    return [LayerKV(k, v) for k, v in zip(keys, values, strict=True)]
