"""Attention with the engine's backend, which computes scores, softmax and the sum in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benches.components import reference
from benches.components.sizes import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    cache,
    check,
    linear,
    randoms,
)
from llorch_worker.model import RaggedBatch
from llorch_worker.model.attention import Attention
from llorch_worker.model.qkv_projection import QkvProjection
from llorch_worker.model.sdpa import SdpaAttention

DECODE_CONTEXT_TOKENS = 512


def batch_of(sequences: int, new_tokens: int, context_tokens: int) -> RaggedBatch:
    """Sequences of one length whose blocks lie one after the other."""
    blocks = -(-context_tokens // BLOCK_TOKENS)
    tables = torch.arange(sequences * blocks).view(sequences, blocks)
    positions = torch.arange(context_tokens - new_tokens, context_tokens).repeat(sequences)
    owners = torch.arange(sequences).repeat_interleave(new_tokens)
    first_slots = tables[owners, positions // BLOCK_TOKENS] * BLOCK_TOKENS
    return RaggedBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        query_lengths=(new_tokens,) * sequences,
        context_lengths=(context_tokens,) * sequences,
        block_tables=tables,
        slots=first_slots + positions % BLOCK_TOKENS,
        logits_rows=positions[:0],
    )


@pytest.mark.parametrize("tokens", [1, 8, 32, 128])
@pytest.mark.benchmark(group="attention_scores")
def test_attention_scores(benchmark: Any, dtype: torch.dtype, tokens: int) -> None:
    """The prefill of one sequence of ``tokens``."""
    store = cache(dtype)
    batch = batch_of(1, tokens, tokens)
    q, k, v = (randoms(tokens, HEADS, HEAD_DIM, dtype=dtype, seed=seed) for seed in range(3))
    store.kv.write(0, batch.slots, k, v)
    step = SdpaAttention().prepare(batch, store)
    check(step.attend(0, q, k, v), reference.attention(q, k, v), dtype)
    benchmark(step.attend, 0, q, k, v)


@pytest.mark.parametrize("sequences", [1, 8, 16, 32])
@pytest.mark.benchmark(group="attention_decode")
def test_attention_decode(benchmark: Any, dtype: torch.dtype, sequences: int) -> None:
    """One new token for each sequence, on 512 tokens of context."""
    store = cache(dtype, sequences * DECODE_CONTEXT_TOKENS)
    batch = batch_of(sequences, 1, DECODE_CONTEXT_TOKENS)
    shape = (sequences * DECODE_CONTEXT_TOKENS, HEADS, HEAD_DIM)
    keys, values = randoms(*shape, dtype=dtype, seed=1), randoms(*shape, dtype=dtype, seed=2)
    store.kv.write(0, torch.arange(len(keys)), keys, values)
    q = randoms(sequences, HEADS, HEAD_DIM, dtype=dtype)
    k, v = keys[batch.slots], values[batch.slots]
    step = SdpaAttention().prepare(batch, store)
    contexts = zip(
        q.split(1),
        keys.split(DECODE_CONTEXT_TOKENS),
        values.split(DECODE_CONTEXT_TOKENS),
        strict=True,
    )
    plain = [reference.attention(*each) for each in contexts]
    check(step.attend(0, q, k, v), torch.cat(plain), dtype)
    benchmark(step.attend, 0, q, k, v)


@pytest.fixture(scope="module")
def attention(dtype: torch.dtype) -> Attention:
    qkv = linear(3 * HIDDEN, HIDDEN, dtype)
    return Attention(
        0,
        QkvProjection(qkv, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM),
        linear(HIDDEN, HIDDEN, dtype, seed=2),
    )


@pytest.mark.parametrize("tokens", [1, 8, 32])
@pytest.mark.benchmark(group="full_attention")
def test_full_attention(
    benchmark: Any, dtype: torch.dtype, attention: Attention, tokens: int
) -> None:
    """QKV, RoPE, the cache, attention and the output matrix: prefill of one sequence."""
    store = cache(dtype)
    batch = batch_of(1, tokens, tokens)
    x = randoms(tokens, HIDDEN, dtype=dtype)
    cos, sin = store.rope.at(batch.positions)
    step = SdpaAttention().prepare(batch, store)
    plain = reference.matmul(x, attention.qkv.linear.weight)  # type: ignore[attr-defined]
    q, k, v = plain.view(tokens, 3, HEADS, HEAD_DIM).unbind(1)
    q, k = reference.rope(q, batch.positions), reference.rope(k, batch.positions)
    expected = reference.matmul(reference.attention(q, k, v), attention.output.weight)  # type: ignore[attr-defined]
    check(attention(x, cos, sin, batch.slots, store, step), expected, dtype)
    benchmark(attention, x, cos, sin, batch.slots, store, step)
