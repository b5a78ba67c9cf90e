"""The work lists of attention: which new tokens meet which part of their context in one program.

An item, ``COLUMNS`` numbers of 32 bits, is a tile of one sequence's new tokens and a part of the
context. Tiles begin at multiples of their size, so that a token's place in its tile depends on its
position alone. The tile is ``sequence`` (the row of its block table), ``start`` (the tile's first
position), ``first`` and ``stop`` (its new tokens), ``row`` (of the first). The part is ``begin``,
``end``, ``slot`` (where the result waits for the other parts; -1: it is the only one) and
``piece``. The list begins with the number of items. A join, four numbers, is a tile's count of new
tokens, its ``row``, its first slot and the number of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from llorch_worker.kernels.interface import PagedSequences
from llorch_worker.kernels.triton.attention_tiles import AttentionTiles
from llorch_worker.kernels.upload import on_device

COLUMNS = 9
PIECE = 512
"""Tokens of a piece of a context."""
MOST_PIECES = 128
"""Beyond as many, pieces double, which bounds what a long context leaves to be joined."""
MOST_SLOTS = 8192
"""Of decode. The sequences beyond are not divided: their number alone occupies a card."""
_COLUMNS = tl.constexpr(COLUMNS)
_DOUBLINGS = tl.constexpr(20)


@dataclass(frozen=True)
class Work:
    """The items of one launch, on the device."""

    list: torch.Tensor
    joins: torch.Tensor
    """[tiles, 4] int32; a tile of one part needs none, but may be listed."""
    items: int
    """At most."""
    slots: int
    """0 if nothing is divided."""


def decode_work(sequences: PagedSequences, tiles: AttentionTiles, window: int) -> Work:
    """Of sequences with one new token each; made on the device, because a recording would freeze
    numbers of the host."""
    tables, contexts = sequences.block_tables, sequences.device_contexts
    if contexts is None:
        contexts = on_device(sequences.context_lengths, torch.int64, tables.device)
    count = len(sequences.first_rows)
    if sequences.first_rows == tuple(range(count)):
        # Made on the device: nothing may be copied to it while a graph is recorded.
        rows = torch.arange(count, device=tables.device)
    else:
        rows = on_device(sequences.first_rows, torch.int64, tables.device)
    most = [most_pieces(context, window) for context in sequences.context_lengths]
    items = min(sum(most), MOST_SLOTS + count)
    work = torch.empty(1 + items, COLUMNS, dtype=torch.int32, device=tables.device)
    joins = torch.empty(count, 4, dtype=torch.int32, device=tables.device)
    _list[(count,)](
        contexts,
        rows,
        work,
        joins,
        count,
        MOST_SLOTS,
        SEQUENCES=triton.next_power_of_2(count),
        TOKENS=tiles.tokens,
        PIECE=PIECE,
        MOST_PIECES=MOST_PIECES,
        WINDOW=window,
        num_warps=1,
    )
    return Work(work, joins, items, items if max(most) > 1 else 0)


def prefill_work(
    sequences: PagedSequences, tiles: AttentionTiles, window: int, least_parts: int
) -> Work:
    """Of sequences with any number of new tokens. Contexts are divided where there are fewer tiles
    than ``least_parts``; 0 divides none, so that pieces are joined in registers."""
    lengths = np.array(sequences.query_lengths)
    contexts = np.array(sequences.context_lengths)
    size = tiles.tokens
    first_new = contexts - lengths
    first_tile = first_new // size
    of_sequence = (contexts - 1) // size - first_tile + 1
    sequence = np.repeat(np.arange(len(lengths)), of_sequence)
    before = np.cumsum(of_sequence) - of_sequence
    start = (np.arange(len(sequence)) - before[sequence] + first_tile[sequence]) * size
    first = np.maximum(start, first_new[sequence])
    stop = np.minimum(start + size, contexts[sequence])
    row = np.array(sequences.first_rows)[sequence] + first - first_new[sequence]
    piece = np.full_like(start, PIECE)
    reach = np.minimum(start + size, window) if window else start + size
    while (short := reach > piece * MOST_PIECES).any():
        piece[short] *= 2
    begin = np.maximum(first + 1 - window, 0) if window else np.zeros_like(start)
    begin -= begin % (piece if least_parts == 0 else tiles.tile)
    seen = stop - begin
    parts = max(1, least_parts // len(sequence))
    longest = int(seen.max())
    # Whole tiles of keys, and no smaller part than a piece.
    span = max(PIECE, -(-longest // parts // tiles.tile) * tiles.tile) if parts > 1 else longest
    count = -(-seen // span)
    # The last tiles see most keys and take longest, so they begin first.
    order = np.argsort(-stop, kind="stable")
    of_item = np.repeat(order, count[order])
    part = np.arange(len(of_item)) - np.repeat(np.cumsum(count[order]) - count[order], count[order])
    begin_of = begin[of_item] + part * span
    divided = count[of_item] > 1
    slot = np.where(divided, np.cumsum(divided) - 1, -1)
    items = np.stack(
        (
            sequence[of_item],
            start[of_item],
            first[of_item],
            stop[of_item],
            row[of_item],
            begin_of,
            np.minimum(begin_of + span, stop[of_item]),
            slot,
            piece[of_item],
        ),
        axis=1,
    )
    head = np.zeros((1, COLUMNS), np.int64)
    head[0, 0] = len(items)
    joined = divided & (part == 0)
    tile = of_item[joined]
    joins = np.stack((stop[tile] - first[tile], row[tile], slot[joined], count[tile]), axis=1)
    device = sequences.block_tables.device
    return Work(
        on_device(np.concatenate((head, items)), torch.int32, device),
        on_device(joins, torch.int32, device),
        len(items),
        int(divided.sum()),
    )


def most_pieces(context: int, window: int = 0) -> int:
    """At most of any context up to this one."""
    most = min(-(-context // PIECE), MOST_PIECES)
    return min(most, min(-(-window // PIECE), MOST_PIECES) + 1) if window else most


# The number of sequences must not create variants: steps would wait for compilation.
@triton.jit(do_not_specialize=["sequences", "most_slots"])
def _list(
    contexts,
    rows,
    work,
    joins,
    sequences,
    most_slots,
    SEQUENCES: tl.constexpr,
    TOKENS: tl.constexpr,
    PIECE: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The items of one sequence; their place follows from all contexts."""
    each = tl.arange(0, SEQUENCES)
    context = tl.load(contexts + each, mask=each < sequences, other=0).to(tl.int32)
    piece, begin = _pieces(context, TOKENS, PIECE, MOST_PIECES, WINDOW)
    count = tl.cdiv(context - begin, piece)
    # Of a sequence that does not fit, the others are not divided either: the sum only grows.
    count = tl.where(tl.cumsum(count, axis=0) <= most_slots, count, tl.minimum(count, 1))
    sequence = tl.program_id(0)
    place = tl.sum(tl.where(each < sequence, count, 0), axis=0)
    own = tl.sum(tl.where(each == sequence, count, 0), axis=0)

    context = tl.load(contexts + sequence).to(tl.int32)
    row = tl.load(rows + sequence).to(tl.int32)
    piece, begin = _pieces(context, TOKENS, PIECE, MOST_PIECES, WINDOW)
    position = context - 1
    for first in range(0, own, 32):
        part = first + tl.arange(0, 32)
        inside = part < own
        item = work + (1 + place + part) * _COLUMNS
        tl.store(item, sequence + part * 0, mask=inside)
        tl.store(item + 1, position // TOKENS * TOKENS + part * 0, mask=inside)
        tl.store(item + 2, position + part * 0, mask=inside)
        tl.store(item + 3, context + part * 0, mask=inside)
        tl.store(item + 4, row + part * 0, mask=inside)
        tl.store(item + 5, begin + part * piece, mask=inside)
        end = tl.where(own > 1, tl.minimum(begin + (part + 1) * piece, context), context)
        tl.store(item + 6, end, mask=inside)
        tl.store(item + 7, tl.where(own > 1, place + part, -1), mask=inside)
        tl.store(item + 8, piece + part * 0, mask=inside)
    join = joins + sequence.to(tl.int64) * 4
    tl.store(join, 1)
    tl.store(join + 1, row)
    tl.store(join + 2, place)
    tl.store(join + 3, own)
    if sequence == sequences - 1:
        tl.store(work, place + own)


@triton.jit
def _pieces(
    context,
    TOKENS: tl.constexpr,
    PIECE: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The pieces' length, and where the first one begins that the last token sees."""
    reach = (context - 1) // TOKENS * TOKENS + TOKENS
    begin = context * 0
    if WINDOW:
        reach = tl.minimum(reach, WINDOW)
        begin = tl.maximum(context - WINDOW, 0)
    piece = context * 0 + PIECE
    for _ in tl.static_range(_DOUBLINGS):
        piece = tl.where(reach > piece.to(tl.int64) * MOST_PIECES, piece * 2, piece)
    return piece, begin // piece * piece
