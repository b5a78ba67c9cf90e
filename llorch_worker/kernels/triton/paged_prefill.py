"""Causal attention of sequences with any number of new tokens, straight from the paged cache.

Flash attention (arXiv 2205.14135) over a ragged batch: each program takes a tile of one sequence's
new tokens and loops over the part of the context that they may see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels.interface import AttentionForm, PagedSequences
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.triton.attend_tile import LOWEST, attend_tile, constants_of
from llorch_worker.kernels.triton.paged_decode import DecodeTiles, padded_group
from llorch_worker.kernels.upload import on_device


@dataclass(frozen=True)
class PrefillTiles:
    """How a launch is divided; chosen so that no compiled variant spills registers."""

    queries: int
    tile: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, longest_query: int) -> PrefillTiles:
        """For queries in ``dtype``; float32 bypasses the tensor cores and needs more registers."""
        wanted = max(16, triton.next_power_of_2(longest_query))
        if dtype is torch.float32:
            return cls(queries=min(32, wanted), tile=32, num_warps=8, num_stages=1)
        queries = min(128, wanted)
        return cls(queries, tile=64, num_warps=8 if queries == 128 else 4, num_stages=2)

    @classmethod
    def like_decode(
        cls, dtype: torch.dtype, kv_dtype: KvDtype, heads: int, kv_heads: int
    ) -> PrefillTiles:
        """The shapes of decode's products, which round as decode does."""
        decode = DecodeTiles.of(dtype, kv_dtype)
        queries = padded_group(heads, kv_heads)
        return cls(queries, tile=decode.tile, num_warps=4, num_stages=decode.num_stages)


class TritonPrefill:
    """See ``PagedAttention``."""

    def __init__(self, sequences: PagedSequences, *, like_decode: bool = False) -> None:
        self._like_decode = like_decode
        self._tables = sequences.block_tables
        self._longest_query = max(sequences.query_lengths)
        self._first_rows, self._query_lengths, self._contexts = on_device(
            (sequences.first_rows, sequences.query_lengths, sequences.context_lengths),
            torch.int64,
            self._tables.device,
        )

    def __call__(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        _, block_size, kv_heads, head_dim = kv.keys.shape
        heads = qkv.shape[1] - 2 * kv_heads
        tiles = PrefillTiles.of(qkv.dtype, self._longest_query)
        if self._like_decode:
            tiles = PrefillTiles.like_decode(qkv.dtype, kv.kv_dtype, heads, kv_heads)
        count = triton.cdiv(self._longest_query, tiles.queries)
        _prefill[(count, heads, len(self._contexts))](
            qkv,
            kv.keys,
            kv.values,
            kv.keys if kv.key_scales is None else kv.key_scales,
            kv.values if kv.value_scales is None else kv.value_scales,
            self._tables,
            self._first_rows,
            self._query_lengths,
            self._contexts,
            out,
            math.log2(math.e) * form.scale_for(head_dim),
            qkv.stride(0),
            self._tables.stride(0),
            out.stride(0),
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            BLOCK_SIZE=block_size,
            DIM=head_dim,
            BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
            QUERIES=tiles.queries,
            TILE=tiles.tile,
            SCALED=kv.key_scales is not None,
            **constants_of(form),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


# Values that differ between steps must not create variants: steps would wait for compilation.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["first_rows", "query_lengths", "contexts"],
)
def _prefill(
    qkv,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    first_rows,
    query_lengths,
    contexts,
    out,
    log2_scale,
    qkv_stride,
    table_stride,
    out_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """A tile of one sequence's new tokens, one query head."""
    # The last tiles see most keys and take longest, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    kv_head = head // GROUP
    query_length = tl.load(query_lengths + sequence).to(tl.int32)
    if tile * QUERIES >= query_length:
        return
    context = tl.load(contexts + sequence).to(tl.int32)
    first_row = tl.load(first_rows + sequence).to(tl.int64)
    query = tile * QUERIES + tl.arange(0, QUERIES)
    at = tl.arange(0, BLOCK_DIM)
    row = first_row + query
    wanted = (query < query_length)[:, None] & (at < DIM)[None, :]
    q = tl.load(
        qkv + row[:, None] * qkv_stride + head * DIM + at[None, :], mask=wanted, other=0.0
    )  # [queries, dim]
    position = context - query_length + query

    highest = tl.full([QUERIES], LOWEST, tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
    end = tl.minimum(context - query_length + (tile + 1) * QUERIES, context)
    table = tables + sequence.to(tl.int64) * table_stride
    first_seen = 0
    if WINDOW:
        first_seen = tl.maximum(context - query_length + tile * QUERIES + 1 - WINDOW, 0)
    for first in range(first_seen // TILE * TILE, end, TILE):
        place = first + tl.arange(0, TILE)
        known = place < end
        visible = place[None, :] <= position[:, None]
        if WINDOW:
            known = known & (place >= first_seen)
            visible = visible & (place[None, :] > position[:, None] - WINDOW)
        highest, mass, total = attend_tile(
            q,
            keys,
            values,
            key_scales,
            value_scales,
            table,
            kv_head,
            place,
            known,
            visible,
            highest,
            mass,
            total,
            log2_scale,
            KV_HEADS,
            BLOCK_SIZE,
            DIM,
            BLOCK_DIM,
            SCALED,
            CAP,
        )

    attended = total / mass[:, None]
    tl.store(
        out + row[:, None] * out_stride + head * DIM + at[None, :],
        attended.to(q.dtype),
        mask=wanted,
    )
