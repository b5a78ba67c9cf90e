"""One layer as the engine's objects, and as one flat function without objects.

The flat twin calls the same operations on the same weights, so the difference is the cost of
objects and calls. That cost hardly depends on the layer's size: it is visible in a tiny layer and
vanishes in one of Llama-2-7B. Both use torch's matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benches.components.bench_attention import batch_of
from benches.components.sizes import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    ROPE_THETA,
    matrix,
    randoms,
)
from llorch_worker.cache import CacheShape, UnifiedCache
from llorch_worker.kernels import Ops, PagedAttention, PagedSequences, choose_ops
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.model import ForwardPass, RaggedBatch
from llorch_worker.model.block import Attention, Block, RmsNorm, SwiGlu
from llorch_worker.weights import DenseLinear

EPS = 1e-5
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
CONTEXT_TOKENS = 512
DECODING = (1, 16)
"""Sequences, each with one new token on ``CONTEXT_TOKENS``."""
PREFILLS = (8, 32, 128, 512)
"""Tokens of one sequence."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    heads: int
    head_dim: int
    intermediate: int


SHAPES = {
    "tiny": Shape(64, 2, 32, 176),
    "llama-2-7b": Shape(HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE),
}


@dataclass(frozen=True)
class Layer:
    """The same weights twice: in the engine's objects, and as plain tensors."""

    shape: Shape
    ops: Ops
    block: Block
    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def of(cls, shape: Shape) -> Layer:
        ops = choose_ops(CPU, DTYPE, head_dim=shape.head_dim).ops
        hidden, intermediate = shape.hidden, shape.intermediate
        qkv, output = matrix(3 * hidden, hidden, DTYPE), matrix(hidden, hidden, DTYPE, seed=2)
        gate_up = matrix(2 * intermediate, hidden, DTYPE, seed=3)
        down = matrix(hidden, intermediate, DTYPE, seed=4)
        norms = [randoms(hidden, dtype=DTYPE, seed=seed) for seed in (5, 6)]
        return cls(
            shape=shape,
            ops=ops,
            block=Block(
                attention_norm=RmsNorm(norms[0], EPS, ops),
                attention=Attention(
                    0, DenseLinear(qkv), DenseLinear(output), head_dim=shape.head_dim
                ),
                mlp_norm=RmsNorm(norms[1], EPS, ops),
                mlp=SwiGlu(DenseLinear(gate_up), DenseLinear(down), ops),
            ),
            attention_norm=norms[0],
            qkv=qkv,
            output=output,
            mlp_norm=norms[1],
            gate_up=gate_up,
            down=down,
        )

    def cache(self, batch: RaggedBatch) -> UnifiedCache:
        return UnifiedCache.allocate(
            CacheShape(
                num_layers=1,
                num_kv_heads=self.shape.heads,
                head_dim=self.shape.head_dim,
                rope_theta=ROPE_THETA,
                rope_scaling=None,
                max_context=max(batch.context_lengths),
                block_size=BLOCK_TOKENS,
                dtype=DTYPE,
                device=CPU,
            ),
            batch.block_tables.numel(),
        )


@pytest.fixture(scope="module", params=SHAPES)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer.of(SHAPES[request.param])


@pytest.mark.parametrize("way", ["modules", "flat"])
@pytest.mark.parametrize("sequences", DECODING)
@pytest.mark.benchmark(group="layer_decode")
def test_layer_decode(benchmark: Any, layer: Layer, sequences: int, way: str) -> None:
    batch = batch_of(sequences, 1, CONTEXT_TOKENS)
    _measure(benchmark, layer, batch, way)


@pytest.mark.parametrize("way", ["modules", "flat"])
@pytest.mark.parametrize("tokens", PREFILLS)
@pytest.mark.benchmark(group="layer_prefill")
def test_layer_prefill(benchmark: Any, layer: Layer, tokens: int, way: str) -> None:
    _measure(benchmark, layer, batch_of(1, tokens, tokens), way)


def _measure(benchmark: Any, layer: Layer, batch: RaggedBatch, way: str) -> None:
    x, residual = (
        randoms(len(batch.positions), layer.shape.hidden, dtype=DTYPE, seed=seed) for seed in (7, 8)
    )
    ways = {"modules": _modules(layer, batch), "flat": _flat(layer, batch)}
    for ours, theirs in zip(
        ways["modules"](x.clone(), residual.clone()),
        ways["flat"](x.clone(), residual.clone()),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    run = ways[way]
    # Both arguments may be overwritten.
    benchmark(lambda: run(x.clone(), residual.clone()))


Run = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _modules(layer: Layer, batch: RaggedBatch) -> Run:
    step = ForwardPass(batch, layer.cache(batch), layer.ops)
    return lambda x, residual: layer.block(x, residual, step)


def _flat(layer: Layer, batch: RaggedBatch) -> Run:
    store = layer.cache(batch)
    cos, sin = store.rope.at(batch.positions)
    prepare = (
        layer.ops.paged_decode
        if batch.query_lengths[0] == 1
        else lambda sequences: layer.ops.paged_prefill(sequences, store.masks)
    )
    attend = prepare(
        PagedSequences(
            first_rows=tuple(range(0, len(batch.positions), batch.query_lengths[0])),
            query_lengths=batch.query_lengths,
            context_lengths=batch.context_lengths,
            block_tables=batch.block_tables,
            block_size=BLOCK_TOKENS,
        )
    )
    kv = store.kv.layers[0]
    return lambda x, residual: _flat_layer(layer, x, residual, cos, sin, batch.slots, kv, attend)


def _flat_layer(
    layer: Layer,
    x: torch.Tensor,
    residual: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: LayerKV,
    attend: PagedAttention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All operations of a layer in order; returns two tensors [tokens, hidden]."""
    ops = layer.ops
    x, residual = ops.add_rms_norm(x, residual, layer.attention_norm, EPS)
    qkv = F.linear(x, layer.qkv).view(len(x), -1, layer.shape.head_dim)
    ops.rope_and_write(qkv, cos, sin, slots, kv)
    attended = torch.empty_like(x)
    attend(qkv, kv, attended)
    x, residual = ops.add_rms_norm(F.linear(attended, layer.output), residual, layer.mlp_norm, EPS)
    gated = ops.silu_and_mul(F.linear(x, layer.gate_up))
    return F.linear(gated, layer.down), residual
