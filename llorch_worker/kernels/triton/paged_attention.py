"""Causal attention of any new tokens, straight from the paged cache: decode and prefill alike.

Flash attention (arXiv 2205.14135) with a divided context (Dao et al., Flash-Decoding, 2023). A
program takes an item of a work list: some new tokens of one sequence, the query heads of one KV
head, and a part of the context. The heads of a group are rows of one tile, so keys are read once
for all of them. A second kernel joins the parts.

In decode, a part is a *piece*: a stretch of the context that depends on nothing but the position
of the token. Pieces are joined from left to right, by that kernel or, where a tile is one item, in
registers with the same arithmetic. So a token has the same bits in every batch, and in a prefill
that takes decode's tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from llorch_worker.kernels.interface import AttentionForm, PagedSequences
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.triton.attention_tiles import MAX_REGISTERS, AttentionTiles, padded_group
from llorch_worker.kernels.triton.attention_work import COLUMNS, Work, decode_work, prefill_work

LOWEST = tl.constexpr(-3.0e38)
"""Where the largest score begins. Not -inf: the difference to a tile without a visible key would be
NaN."""
_COLUMNS = tl.constexpr(COLUMNS)
_JOINED_DIMS = 64
_PROGRAMS_PER_PROCESSOR = 4


@dataclass(frozen=True)
class Card:
    """What the kernels are launched for."""

    processors: int
    """Its streaming multiprocessors, all of which a launch should use."""
    shared_bytes: int
    """Shared memory that a program may have."""

    @property
    def programs(self) -> int:
        """So many run at once."""
        return self.processors * _PROGRAMS_PER_PROCESSOR


class TritonAttention:
    """See ``PagedAttention``."""

    def __init__(
        self, sequences: PagedSequences, card: Card, *, decodes: bool, batch_invariant: bool
    ) -> None:
        self._sequences = sequences
        self._card = card
        self._decodes = decodes
        self._folds = decodes or batch_invariant
        self._longest = max(sequences.query_lengths)
        self._work: dict[tuple[int, AttentionTiles], Work] = {}

    def __call__(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        _, block_size, kv_heads, head_dim = kv.keys.shape
        group = qkv.shape[1] // kv_heads - 2
        block_dim = max(16, triton.next_power_of_2(head_dim))
        tiles = AttentionTiles.of(
            qkv.dtype,
            block_dim,
            group,
            1 if self._folds else self._longest,
            self._card.shared_bytes,
        )
        programs = self._card.programs
        work = self._work_of(form.window or 0, tiles, kv_heads, programs)
        stored = group * (1 if self._decodes else min(self._longest, tiles.tokens))
        shape = (work.slots, kv_heads, stored)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=out.device)
        stats = torch.empty((*shape, 2), dtype=torch.float32, device=out.device)
        grid = work.items * kv_heads
        if self._sequences.device_contexts is not None:
            # A recording has room for the longest contexts, of which it reads only what exists.
            grid = min(grid, programs)
        tables = self._sequences.block_tables
        _attend[(grid,)](
            qkv,
            kv.keys,
            kv.values,
            kv.keys if kv.key_scales is None else kv.key_scales,
            kv.values if kv.value_scales is None else kv.value_scales,
            tables,
            work.list,
            out,
            parts,
            stats,
            math.log2(math.e) * form.scale_for(head_dim),
            qkv.stride(0),
            tables.stride(0),
            out.stride(0),
            stored,
            KV_HEADS=kv_heads,
            GROUP=group,
            BLOCK_GROUP=padded_group(group),
            BLOCK_SIZE=block_size,
            DIM=head_dim,
            BLOCK_DIM=block_dim,
            ROWS=tiles.rows,
            TILE=tiles.tile,
            FOLDS=self._folds,
            SCALED=kv.key_scales is not None,
            **constants_of(form),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            maxnreg=MAX_REGISTERS,
        )
        if work.slots:
            dims = min(block_dim, _JOINED_DIMS)
            _join[(len(work.joins), stored // group, kv_heads * triton.cdiv(head_dim, dims))](
                parts,
                stats,
                work.joins,
                out,
                out.stride(0),
                stored,
                KV_HEADS=kv_heads,
                GROUP=group,
                BLOCK_GROUP=padded_group(group),
                DIM=head_dim,
                BLOCK_DIM=dims,
            )

    def _work_of(self, window: int, tiles: AttentionTiles, kv_heads: int, programs: int) -> Work:
        """Layers with one window share a list."""
        key = (window, tiles)
        if key not in self._work:
            if self._decodes:
                made = decode_work(self._sequences, tiles, window)
            else:
                least_parts = 0 if self._folds else -(-programs // kv_heads)
                made = prefill_work(self._sequences, tiles, window, least_parts)
            self._work[key] = made
        return self._work[key]


def constants_of(form: AttentionForm) -> dict[str, float]:
    """What the kernels are compiled for: a model has at most one window and one cap."""
    return {"WINDOW": form.window or 0, "CAP": math.log2(math.e) * (form.softcap or 0.0)}


# Values that differ between steps must not create variants: steps would wait for compilation.
@triton.jit(
    do_not_specialize=["table_stride", "stored"], do_not_specialize_on_alignment=["tables", "work"]
)
def _attend(
    qkv,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    work,
    out,
    parts,
    stats,
    log2_scale,
    qkv_stride,
    table_stride,
    out_stride,
    stored,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FOLDS: tl.constexpr,
    SCALED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Items of the work list, each for one KV head."""
    each = tl.arange(0, ROWS)
    member = each % BLOCK_GROUP
    at = tl.arange(0, BLOCK_DIM)
    items = tl.load(work) * KV_HEADS
    for number in range(tl.program_id(0), items, tl.num_programs(0)):
        item = work + (1 + number // KV_HEADS) * _COLUMNS
        kv_head = number % KV_HEADS
        sequence = tl.load(item)
        start = tl.load(item + 1)
        first_new = tl.load(item + 2)
        stop = tl.load(item + 3)
        first_row = tl.load(item + 4).to(tl.int64)
        begin = tl.load(item + 5)
        end = tl.load(item + 6)
        slot = tl.load(item + 7).to(tl.int64)
        piece = tl.load(item + 8)

        position = start + each // BLOCK_GROUP
        is_new = (position >= first_new) & (position < stop) & (member < GROUP)
        local = position - first_new
        head = kv_head * GROUP + member
        wanted = is_new[:, None] & (at[None, :] < DIM)
        q = tl.load(
            qkv + (first_row + local)[:, None] * qkv_stride + head[:, None] * DIM + at[None, :],
            mask=wanted,
            other=0.0,
        )  # [rows, dim]
        first_seen = 0
        if WINDOW:
            first_seen = tl.maximum(first_new + 1 - WINDOW, 0)
        table = tables + sequence.to(tl.int64) * table_stride

        highest = tl.full([ROWS], LOWEST, tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        if FOLDS:
            for first in range(begin, end, piece):
                piece_highest = tl.full([ROWS], LOWEST, tl.float32)
                piece_mass = tl.zeros([ROWS], tl.float32)
                piece_total = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
                for tile in range(
                    tl.maximum(first, first_seen // TILE * TILE),
                    tl.minimum(first + piece, end),
                    TILE,
                ):
                    piece_highest, piece_mass, piece_total = _attend_tile(
                        q,
                        keys,
                        values,
                        key_scales,
                        value_scales,
                        table,
                        kv_head,
                        tile,
                        first_seen,
                        tl.minimum(first + piece, end),
                        position,
                        piece_highest,
                        piece_mass,
                        piece_total,
                        log2_scale,
                        KV_HEADS,
                        BLOCK_SIZE,
                        DIM,
                        BLOCK_DIM,
                        TILE,
                        SCALED,
                        WINDOW,
                        CAP,
                    )
                highest, mass, total = _fold(
                    highest, mass, total, piece_highest, piece_mass, piece_total
                )
        else:
            for tile in range(begin, end, TILE):
                highest, mass, total = _attend_tile(
                    q,
                    keys,
                    values,
                    key_scales,
                    value_scales,
                    table,
                    kv_head,
                    tile,
                    first_seen,
                    end,
                    position,
                    highest,
                    mass,
                    total,
                    log2_scale,
                    KV_HEADS,
                    BLOCK_SIZE,
                    DIM,
                    BLOCK_DIM,
                    TILE,
                    SCALED,
                    WINDOW,
                    CAP,
                )

        if slot < 0:
            attended = total / mass[:, None]
            tl.store(
                out + (first_row + local)[:, None] * out_stride + head[:, None] * DIM + at[None, :],
                attended.to(q.dtype),
                mask=wanted,
            )
        else:
            cell = (slot * KV_HEADS + kv_head) * stored + local * GROUP + member
            tl.store(stats + cell * 2, highest, mask=is_new)
            tl.store(stats + cell * 2 + 1, mass, mask=is_new)
            tl.store(parts + cell[:, None] * DIM + at[None, :], total, mask=wanted)


@triton.jit
def _attend_tile(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    first,
    first_seen,
    end,
    position,
    highest,
    mass,
    total,
    log2_scale,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add the keys from ``first`` on, of those before ``end``, to an online softmax.

    ``q``: [rows, dim], at ``position``: [rows]; ``table``: a sequence's block table. ``highest``,
    ``mass`` (both [rows]) and ``total`` ([rows, dim]) are the softmax so far; returns them with
    this tile added. CAP: of scores, as powers of two; 0 is none.
    """
    place = first + tl.arange(0, TILE)
    known = place < end
    visible = known[None, :] & (place[None, :] <= position[:, None])
    if WINDOW:
        known = known & (place >= first_seen)
        visible = visible & (place[None, :] > position[:, None] - WINDOW)
    at = tl.arange(0, BLOCK_DIM)
    block = tl.load(table + place // BLOCK_SIZE, mask=known, other=0)
    cell = (block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * KV_HEADS + kv_head
    # Nothing beyond the context is read: it may be another sequence's NaN.
    inside = known[:, None] & (at[None, :] < DIM)
    k = tl.load(keys + cell[:, None] * DIM + at[None, :], mask=inside, other=0.0)
    if SCALED:
        k = k.to(tl.float32)
    k = k.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale  # [rows, tile]
    if SCALED:
        scores *= tl.load(key_scales + cell, mask=known, other=0.0)[None, :]
    if CAP != 0.0:  # CAP * tanh(scores / CAP), as 1 - 2 / (e^2x + 1)
        scores = CAP - 2.0 * CAP / (tl.exp2(scores * (2.885390082 / CAP)) + 1.0)
    scores = tl.where(visible, scores, float("-inf"))
    peak = tl.maximum(highest, tl.max(scores, axis=1))
    fade = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak[:, None])
    mass = mass * fade + tl.sum(weights, axis=1)
    if SCALED:
        weights *= tl.load(value_scales + cell, mask=known, other=0.0)[None, :]
    v = tl.load(values + cell[:, None] * DIM + at[None, :], mask=inside, other=0.0)
    if SCALED:
        v = v.to(tl.float32)
    v = v.to(q.dtype)
    total = total * fade[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    return peak, mass, total


@triton.jit
def _fold(highest, mass, total, next_highest, next_mass, next_total):
    """Two softmaxes of one row, one after the other. Adding to an empty one changes no bit."""
    peak = tl.maximum(highest, next_highest)
    fade = tl.exp2(highest - peak)
    share = tl.exp2(next_highest - peak)
    # Explicit, so that both kernels that fold round alike.
    mass = tl.fma(mass, fade, next_mass * share)
    total = tl.fma(total, fade[:, None], next_total * share[:, None])
    return peak, mass, total


@triton.jit(do_not_specialize=["stored"], do_not_specialize_on_alignment=["joins"])
def _join(
    parts,
    stats,
    joins,
    out,
    out_stride,
    stored,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The parts of one new token, in the order of the context, for the heads of one KV head."""
    join = joins + tl.program_id(0).to(tl.int64) * 4
    local = tl.program_id(1)
    kv_head = tl.program_id(2) % KV_HEADS
    slot = tl.load(join + 2).to(tl.int64)
    count = tl.load(join + 3)
    if (count < 2) | (local >= tl.load(join)):
        return
    row = tl.load(join + 1).to(tl.int64) + local
    member = tl.arange(0, BLOCK_GROUP)
    at = tl.program_id(2) // KV_HEADS * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    inside = (member < GROUP)[:, None] & (at < DIM)[None, :]
    highest = tl.full([BLOCK_GROUP], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK_GROUP], tl.float32)
    total = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for part in range(0, count):
        cell = ((slot + part) * KV_HEADS + kv_head) * stored + local * GROUP + member
        next_highest = tl.load(stats + cell * 2, mask=member < GROUP, other=LOWEST)
        next_mass = tl.load(stats + cell * 2 + 1, mask=member < GROUP, other=0.0)
        here = parts + cell[:, None] * DIM + at[None, :]
        next_total = tl.load(here, mask=inside, other=0.0)
        highest, mass, total = _fold(highest, mass, total, next_highest, next_mass, next_total)
    head = kv_head * GROUP + member
    tl.store(
        out + row * out_stride + head[:, None] * DIM + at[None, :],
        (total / mass[:, None]).to(out.dtype.element_ty),
        mask=inside,
    )
