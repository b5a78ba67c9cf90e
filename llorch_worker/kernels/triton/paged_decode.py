"""Attention of sequences with one new token each, straight from the paged cache.

Split-KV as in Flash-Decoding (Dao et al., 2023): a sequence's context is divided into ``splits``
equal pieces with a program each, so that batch 1 also fills a card; a second kernel joins the
pieces. The query heads of one KV head share a program and read its keys once.

No Python number changes between steps: contexts come from the device, and the grid depends only on
the number of sequences. So a launch can be recorded in a CUDA graph and replayed with other
contexts.
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
from llorch_worker.kernels.upload import on_device

_PROGRAMS_PER_PROCESSOR = 4
MOST_SPLITS = 64


def splits_for(sequences: int, kv_heads: int, processors: int) -> int:
    """A power of two that gives each of the card's processors a few programs."""
    wanted = _PROGRAMS_PER_PROCESSOR * processors / (sequences * kv_heads)
    return min(MOST_SPLITS, 1 << max(0, math.floor(math.log2(wanted))))


@dataclass(frozen=True)
class DecodeTiles:
    """Keys per iteration of a program, and stages of its load pipeline."""

    tile: int
    num_stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, kv_dtype: KvDtype) -> DecodeTiles:
        """Chosen so that the kernel does not spill registers: in float32 they hold all arithmetic
        and the values before conversion."""
        if dtype is torch.float32 and kv_dtype != "auto":
            return cls(tile=32, num_stages=1)
        return cls(tile=64, num_stages=3)


def padded_group(heads: int, kv_heads: int) -> int:
    """Rows of a program's queries: the query heads of a KV head, padded for the tensor cores."""
    return max(16, int(triton.next_power_of_2(heads // kv_heads)))


class TritonDecode:
    """See ``PagedAttention``."""

    def __init__(
        self, sequences: PagedSequences, processors: int, most_splits: int = MOST_SPLITS
    ) -> None:
        tables = sequences.block_tables
        contexts = sequences.device_contexts
        if contexts is None:
            contexts = on_device(sequences.context_lengths, torch.int64, tables.device)
        count = len(sequences.first_rows)
        if sequences.first_rows == tuple(range(count)):
            # Made on the device: nothing may be copied to it while a graph is recorded.
            rows = torch.arange(count, device=tables.device)
        else:
            rows = on_device(sequences.first_rows, torch.int64, tables.device)
        self._rows = rows
        self._contexts = contexts
        self._tables = tables
        self._processors = processors
        self._most_splits = most_splits

    def __call__(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        sequences = len(self._rows)
        _, block_size, kv_heads, head_dim = kv.keys.shape
        heads = qkv.shape[1] - 2 * kv_heads
        splits = min(self._most_splits, splits_for(sequences, kv_heads, self._processors))
        pieces = stats = out  # not read with one split
        if splits > 1:
            shape = (sequences, heads, splits)
            pieces = torch.empty((*shape, head_dim), dtype=torch.float32, device=out.device)
            stats = torch.empty((*shape, 2), dtype=torch.float32, device=out.device)
        tiles = DecodeTiles.of(qkv.dtype, kv.kv_dtype)
        block_dim = max(16, triton.next_power_of_2(head_dim))
        _decode[(sequences, kv_heads, splits)](
            qkv,
            kv.keys,
            kv.values,
            kv.keys if kv.key_scales is None else kv.key_scales,
            kv.values if kv.value_scales is None else kv.value_scales,
            self._tables,
            self._contexts,
            self._rows,
            out,
            pieces,
            stats,
            math.log2(math.e) * form.scale_for(head_dim),
            qkv.stride(0),
            self._tables.stride(0),
            out.stride(0),
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            BLOCK_SIZE=block_size,
            DIM=head_dim,
            BLOCK_GROUP=padded_group(heads, kv_heads),
            BLOCK_DIM=block_dim,
            TILE=tiles.tile,
            SPLITS=splits,
            SCALED=kv.key_scales is not None,
            **constants_of(form),
            num_stages=tiles.num_stages,
        )
        if splits > 1:
            _join[(sequences, heads)](
                pieces,
                stats,
                self._rows,
                out,
                out.stride(0),
                HEADS=heads,
                DIM=head_dim,
                BLOCK_DIM=block_dim,
                SPLITS=splits,
            )


# Values that differ between steps must not create variants: steps would wait for compilation.
@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    qkv,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    contexts,
    rows,
    out,
    pieces,
    stats,
    log2_scale,
    qkv_stride,
    table_stride,
    out_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """One piece of one sequence's context, seen by the query heads of one KV head."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts + sequence).to(tl.int32)
    row = tl.load(rows + sequence).to(tl.int64)
    first_seen = 0
    if WINDOW:
        first_seen = tl.maximum(context - WINDOW, 0)
    first_tile = first_seen // TILE * TILE
    piece = tl.cdiv(tl.cdiv(context - first_tile, TILE), SPLITS) * TILE
    begin = first_tile + split * piece
    end = tl.minimum(begin + piece, context)

    member = tl.arange(0, BLOCK_GROUP)
    at = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + member
    wanted = (member[:, None] < GROUP) & (at[None, :] < DIM)
    q = tl.load(
        qkv + row * qkv_stride + head[:, None] * DIM + at[None, :], mask=wanted, other=0.0
    )  # [group, dim]

    highest = tl.full([BLOCK_GROUP], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK_GROUP], tl.float32)
    total = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    for first in range(begin, end, TILE):
        place = first + tl.arange(0, TILE)
        known = place < end
        if WINDOW:
            known = known & (place >= first_seen)
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
            known[None, :],
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

    if SPLITS == 1:
        attended = total / mass[:, None]
        tl.store(
            out + row * out_stride + head[:, None] * DIM + at[None, :],
            attended.to(q.dtype),
            mask=wanted,
        )
    else:
        cell = (sequence.to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split
        tl.store(stats + cell * 2, highest, mask=member < GROUP)
        tl.store(stats + cell * 2 + 1, mass, mask=member < GROUP)
        if begin < end:
            tl.store(pieces + cell[:, None] * DIM + at[None, :], total, mask=wanted)


@triton.jit
def _join(
    pieces,
    stats,
    rows,
    out,
    out_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The pieces of one head of one sequence, each weighted by its share of the softmax."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    cell = (sequence.to(tl.int64) * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    highest = tl.load(stats + cell * 2)
    mass = tl.load(stats + cell * 2 + 1)
    weight = tl.exp2(highest - tl.max(highest, axis=0))
    at = tl.arange(0, BLOCK_DIM)
    # A piece beyond the context's end was not written.
    inside = (mass[:, None] > 0) & (at[None, :] < DIM)
    total = tl.load(pieces + cell[:, None] * DIM + at[None, :], mask=inside, other=0.0)
    attended = tl.sum(total * weight[:, None], axis=0) / tl.sum(mass * weight, axis=0)
    row = tl.load(rows + sequence).to(tl.int64)
    tl.store(
        out + row * out_stride + head * DIM + at,
        attended.to(out.dtype.element_ty),
        mask=at < DIM,
    )
