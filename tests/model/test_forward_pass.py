"""Attention over a batch against the formula, written out for one sequence at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.cache import CacheShape, UnifiedCache
from llorch_worker.kernels import TorchOps
from llorch_worker.model import ForwardPass, RaggedBatch

BLOCK_SIZE, HEAD_DIM = 4, 8


def plain_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """softmax(q k / sqrt(d)) v, head by head; q: [query, heads, d], keys: [context, kv, d]."""
    query_len, heads, _ = q.shape
    context_len, kv_heads, _ = keys.shape
    out = torch.empty_like(q)
    for head in range(heads):
        kv_head = head * kv_heads // heads
        scores = q[:, head] @ keys[:, kv_head].T / math.sqrt(HEAD_DIM)
        for i in range(query_len):
            scores[i, context_len - query_len + i + 1 :] = float("-inf")
        out[:, head] = scores.softmax(-1) @ values[:, kv_head]
    return out.reshape(query_len, -1)


def run(
    lengths: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype = torch.float32,
    max_query_tokens: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of (query, context) pairs in shuffled blocks: (the pass's, plain), by token row."""
    torch.manual_seed(sum(q * 31 + c for q, c in lengths))
    widths = [-(-context // BLOCK_SIZE) for _, context in lengths]
    shape: dict[str, Any] = {"num_layers": 2, "num_kv_heads": kv_heads, "head_dim": HEAD_DIM}
    cache = UnifiedCache.allocate(
        CacheShape(
            **shape,
            rope_theta=1e4,
            rope_scaling=None,
            max_context=128,
            block_size=BLOCK_SIZE,
            max_query_tokens=max_query_tokens,
            dtype=dtype,
            device=torch.device("cpu"),
        ),
        sum(widths) + 1,
    )
    # Block 0 belongs to nobody and pads the tables: nothing may be read from it.
    cache.kv.keys[:, 0] = cache.kv.values[:, 0] = float("nan")
    free = (torch.randperm(sum(widths)) + 1).tolist()
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int64)
    rows, rows_out, row_slots = [], [], []
    for i, (query, context) in enumerate(lengths):
        blocks = torch.tensor([free.pop() for _ in range(widths[i])])
        tables[i, : widths[i]] = blocks
        places = torch.arange(context)
        slots = blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        q = torch.randn(query, heads, HEAD_DIM).to(dtype)
        keys = torch.randn(context, kv_heads, HEAD_DIM).to(dtype)
        values = torch.randn(context, kv_heads, HEAD_DIM).to(dtype)
        old = slots[:-query]  # the pass writes the new ones itself
        cache.kv.layers[1].write(old, keys[:-query], values[:-query])
        rows.append(torch.cat((q, keys[-query:], values[-query:]), dim=1))
        row_slots.append(slots[-query:])
        rows_out.append(plain_attention(q.float(), keys.float(), values.float()))
    tokens = sum(query for query, _ in lengths)
    batch = RaggedBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.zeros(tokens, dtype=torch.int64),  # where RoPE turns nothing
        query_lengths=tuple(query for query, _ in lengths),
        context_lengths=tuple(context for _, context in lengths),
        block_tables=tables,
        slots=torch.cat(row_slots),
        logits_rows=torch.zeros(0, dtype=torch.int64),
    )
    out = ForwardPass(batch, cache, TorchOps()).attend(1, torch.cat(rows))
    return out, torch.cat(rows_out)


LENGTHS = st.lists(
    st.integers(1, 60).flatmap(lambda c: st.tuples(st.integers(1, c), st.just(c))),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.sampled_from([(1, 1), (6, 6), (6, 2), (4, 1)]), st.sampled_from([3, 1024]))
def test_any_mixture_of_prefill_and_decode_follows_the_formula(
    lengths: list[tuple[int, int]], heads: tuple[int, int], max_query_tokens: int
) -> None:
    actual, expected = run(
        lengths, heads=heads[0], kv_heads=heads[1], max_query_tokens=max_query_tokens
    )
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(1, 5), (1, 5)],
        [(1, 5), (1, 17), (1, 4)],
        [(8, 8)],
        [(3, 8)],
        [(1, 9), (6, 6), (1, 3), (2, 50)],
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_follow_the_formula(
    lengths: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    actual, expected = run(lengths, heads=4, kv_heads=2, dtype=dtype)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, atol=0.03, rtol=0.03)
