"""Attention as the engine runs it: scores, softmax and weighted sum in one call."""

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
from llorch_worker.cache import Places, UnifiedCache
from llorch_worker.kernels import PLAIN, Ops, PagedSequences
from llorch_worker.model import ForwardPass, RaggedBatch
from llorch_worker.model.block import Attention

DECODE_CONTEXT_TOKENS = 512


def batch_of(sequences: int, new_tokens: int, context_tokens: int) -> RaggedBatch:
    """Sequences of equal length with consecutive blocks."""
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
        places=(Places(tables.int(), first_slots + positions % BLOCK_TOKENS),),
        logits_rows=positions[:0],
    )


def sequences_of(batch: RaggedBatch) -> PagedSequences:
    count = len(batch.query_lengths)
    return PagedSequences(
        first_rows=tuple(i * batch.query_lengths[0] for i in range(count)),
        query_lengths=batch.query_lengths,
        context_lengths=batch.context_lengths,
        block_tables=batch.places[0].block_tables,
        block_size=BLOCK_TOKENS,
    )


def fill(store: UnifiedCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    store.kv.layers[0].write(slots, k, v)


@pytest.mark.parametrize("tokens", [1, 8, 32, 128])
@pytest.mark.benchmark(group="attention_scores")
def test_attention_scores(benchmark: Any, dtype: torch.dtype, ops: Ops, tokens: int) -> None:
    """The prefill of one sequence of ``tokens``."""
    store = cache(dtype)
    batch = batch_of(1, tokens, tokens)
    q, k, v = (randoms(tokens, HEADS, HEAD_DIM, dtype=dtype, seed=seed) for seed in range(3))
    fill(store, batch.places[0].slots, k, v)
    attend = ops.paged_prefill(sequences_of(batch), store.masks)
    qkv, out = torch.cat((q, k, v), dim=1), torch.empty(tokens, HIDDEN, dtype=dtype)
    attend(qkv, store.kv.layers[0], out, PLAIN)
    check(out, reference.attention(q, k, v), dtype)
    benchmark(attend, qkv, store.kv.layers[0], out, PLAIN)


@pytest.mark.parametrize("sequences", [1, 8, 16, 32])
@pytest.mark.benchmark(group="attention_decode")
def test_attention_decode(benchmark: Any, dtype: torch.dtype, ops: Ops, sequences: int) -> None:
    """One new token per sequence, with 512 tokens of context."""
    store = cache(dtype, sequences * DECODE_CONTEXT_TOKENS)
    batch = batch_of(sequences, 1, DECODE_CONTEXT_TOKENS)
    shape = (sequences * DECODE_CONTEXT_TOKENS, HEADS, HEAD_DIM)
    keys, values = randoms(*shape, dtype=dtype, seed=1), randoms(*shape, dtype=dtype, seed=2)
    fill(store, torch.arange(len(keys)), keys, values)
    q = randoms(sequences, HEADS, HEAD_DIM, dtype=dtype)
    k, v = keys[batch.places[0].slots], values[batch.places[0].slots]
    attend = ops.paged_decode(sequences_of(batch))
    contexts = zip(
        q.split(1),
        keys.split(DECODE_CONTEXT_TOKENS),
        values.split(DECODE_CONTEXT_TOKENS),
        strict=True,
    )
    plain = [reference.attention(*each) for each in contexts]
    qkv, out = torch.cat((q, k, v), dim=1), torch.empty(sequences, HIDDEN, dtype=dtype)
    attend(qkv, store.kv.layers[0], out, PLAIN)
    check(out, torch.cat(plain), dtype)
    benchmark(attend, qkv, store.kv.layers[0], out, PLAIN)


@pytest.fixture(scope="module")
def attention(dtype: torch.dtype) -> Attention:
    qkv = linear(3 * HIDDEN, HIDDEN, dtype)
    return Attention(0, qkv, linear(HIDDEN, HIDDEN, dtype, seed=2), head_dim=HEAD_DIM)


@pytest.mark.parametrize("tokens", [1, 8, 32])
@pytest.mark.benchmark(group="full_attention")
def test_full_attention(
    benchmark: Any, dtype: torch.dtype, ops: Ops, attention: Attention, tokens: int
) -> None:
    """The prefill of one sequence through QKV, RoPE, the cache, attention and the output matrix."""
    store = cache(dtype)
    batch = batch_of(1, tokens, tokens)
    x = randoms(tokens, HIDDEN, dtype=dtype)
    step = ForwardPass(batch, store, ops)
    plain = reference.matmul(x, attention.qkv.weight)  # type: ignore[attr-defined]
    q, k, v = plain.view(tokens, 3, HEADS, HEAD_DIM).unbind(1)
    q, k = reference.rope(q, batch.positions), reference.rope(k, batch.positions)
    expected = reference.matmul(reference.attention(q, k, v), attention.output.weight)  # type: ignore[attr-defined]
    check(attention(x, step), expected, dtype)
    benchmark(attention, x, step)
