"""Products with quantised matrices, dequantised on the fly.

For one token: a matrix-vector product in float32, with scales applied to the sums of groups. For
more: tiles are dequantised into the activations' dtype and multiplied by tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from llorch_worker.kernels.quantised_matrix import BLOCK_COLUMNS, QuantisedMatrix


@dataclass(frozen=True)
class MatmulTiles:
    """The part of a product that one program computes, and its column blocks per iteration."""

    tokens: int
    rows: int
    blocks: int = 2  # 4 would spill registers
    num_warps: int = 4

    @classmethod
    def of(cls, tokens: int, rows: int, processors: int) -> MatmulTiles:
        """The largest tiles that give each of the card's processors two; else the smallest.

        ``tokens`` is rounded up to a power of two, so that few variants are compiled.
        """
        tokens = triton.next_power_of_2(tokens)
        choices = WIDE if tokens > 64 else MIDDLE if tokens > 16 else NARROW
        for choice in choices:
            programs = triton.cdiv(rows, choice.rows) * triton.cdiv(tokens, choice.tokens)
            if programs >= 2 * processors:
                return choice
        return choices[-1]


WIDE = (
    MatmulTiles(128, 128, num_warps=8),
    MatmulTiles(128, 64, num_warps=8),
    MatmulTiles(64, 64),
    MatmulTiles(64, 32),
)
MIDDLE = (MatmulTiles(64, 64), MatmulTiles(64, 32), MatmulTiles(64, 16))
NARROW = (MatmulTiles(16, 16, blocks=8),)
FIXED = MatmulTiles(64, 32)
"""For any number of tokens, so that a token's result does not depend on it."""


def quantised_linear(
    x: torch.Tensor,
    matrix: QuantisedMatrix,
    out: torch.Tensor,
    column: int,
    *,
    batch_invariant: bool = False,
) -> None:
    """See ``kernels.quantised_matrix.quantised_linear``, its twin.

    With ``batch_invariant`` the tiles, and so a token's rounding, are the same in every batch.
    """
    tokens = len(x)
    tables: list[Any] = [
        matrix.codes,
        matrix.codes if matrix.high is None else matrix.high,
        matrix.scales,
        matrix.scales if matrix.offsets is None else matrix.offsets,
    ]
    form = {
        "BITS": matrix.bits,
        "GROUP": matrix.group,
        "ZERO": matrix.zero,
        "OFFSETS": matrix.offsets is not None,
    }
    blocks = matrix.columns // BLOCK_COLUMNS
    target = out[:, column:]
    if tokens == 1 and not batch_invariant:
        rows = 8
        _matvec[(triton.cdiv(matrix.rows, rows),)](
            x, *tables, target, matrix.factor, matrix.rows, blocks, ROWS=rows, BLOCKS=16, **form
        )
        return
    tiles = FIXED if batch_invariant else MatmulTiles.of(tokens, matrix.rows, _processors(x.device))
    grid = (triton.cdiv(matrix.rows, tiles.rows), triton.cdiv(tokens, tiles.tokens))
    _matmul[grid](
        x,
        *tables,
        target,
        matrix.factor,
        tokens,
        matrix.rows,
        blocks,
        x.stride(0),
        out.stride(0),
        TOKENS=tiles.tokens,
        ROWS=tiles.rows,
        BLOCKS=tiles.blocks,
        **form,
        num_warps=tiles.num_warps,
    )


@lru_cache
def _processors(device: torch.device) -> int:
    """The card's streaming multiprocessors; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _matvec(
    x,
    codes,
    high,
    scales,
    offsets,
    out,
    factor,
    rows,
    blocks,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """A few rows, times one vector."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, 16)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = (row < rows)[:, None] & (block < blocks)[None, :]
        column = block[:, None] * 32 + place[None, :]
        known = (block < blocks)[:, None]
        x_low = tl.load(x + column, mask=known, other=0.0).to(tl.float32)  # [blocks, 16]
        x_high = tl.load(x + column + 16, mask=known, other=0.0).to(tl.float32)
        low, upper = _codes(codes, high, row, block, blocks, inside, BITS)
        low_sum = tl.sum((low - ZERO) * x_low[None, :, :], axis=2)  # [rows, blocks]
        high_sum = tl.sum((upper - ZERO) * x_high[None, :, :], axis=2)
        low_scale, high_scale = _of_groups(scales, row, block, blocks, inside, GROUP)
        parts = low_sum * low_scale + high_sum * high_scale
        if OFFSETS:
            low_offset, high_offset = _of_groups(offsets, row, block, blocks, inside, GROUP)
            parts += low_offset * tl.sum(x_low, axis=1)[None, :]
            parts += high_offset * tl.sum(x_high, axis=1)[None, :]
        total += tl.sum(parts, axis=1)
    tl.store(out + row, (total * factor).to(out.dtype.element_ty), mask=row < rows)


# The number of tokens must not create variants: steps would wait for compilation.
@triton.jit(do_not_specialize=["tokens"])
def _matmul(
    x,
    codes,
    high,
    scales,
    offsets,
    out,
    factor,
    tokens,
    rows,
    blocks,
    x_stride,
    out_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """A tile of rows, times a tile of tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    place = tl.arange(0, BLOCKS * 16)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        inside = (row < rows)[:, None] & (block < blocks)[None, :]
        column = (first + place // 16) * 32 + place % 16
        known = (token < tokens)[:, None] & (column < blocks * 32)[None, :]
        here = x + token[:, None] * x_stride + column[None, :]
        x_low = tl.load(here, mask=known, other=0.0)  # [tokens, blocks * 16]
        x_high = tl.load(here + 16, mask=known, other=0.0)
        low, upper = _codes(codes, high, row, block, blocks, inside, BITS)
        low_scale, high_scale = _of_groups(scales, row, block, blocks, inside, GROUP)
        low = (low - ZERO) * low_scale[:, :, None]
        upper = (upper - ZERO) * high_scale[:, :, None]
        if OFFSETS:
            low_offset, high_offset = _of_groups(offsets, row, block, blocks, inside, GROUP)
            low += low_offset[:, :, None]
            upper += high_offset[:, :, None]
        low = tl.reshape(low.to(x_low.dtype), [ROWS, BLOCKS * 16])
        upper = tl.reshape(upper.to(x_low.dtype), [ROWS, BLOCKS * 16])
        total = tl.dot(x_low, tl.trans(low), total, input_precision="ieee")
        total = tl.dot(x_high, tl.trans(upper), total, input_precision="ieee")
    tl.store(
        out + token[:, None] * out_stride + row[None, :],
        (total * factor).to(out.dtype.element_ty),
        mask=(token < tokens)[:, None] & (row < rows)[None, :],
    )


@triton.jit
def _codes(codes, high, row, block, blocks, inside, BITS: tl.constexpr):
    """Two [rows, blocks, 16] float32: columns 0 to 15 and 16 to 31 of each block."""
    place = tl.arange(0, 16)
    at = row.to(tl.int64)[:, None] * blocks + block[None, :]
    mask = inside[:, :, None]
    if BITS == 8:
        here = codes + at[:, :, None] * 32 + place[None, None, :]
        low = tl.load(here, mask=mask, other=0).to(tl.int32)
        upper = tl.load(here + 16, mask=mask, other=0).to(tl.int32)
    else:
        both = tl.load(codes + at[:, :, None] * 16 + place[None, None, :], mask=mask, other=0)
        both = both.to(tl.int32)
        low = both & 15
        upper = both >> 4
        if BITS == 5:
            word = tl.load(high + at, mask=inside, other=0)[:, :, None]
            low |= ((word >> place[None, None, :]) & 1) << 4
            upper |= ((word >> (place[None, None, :] + 16)) & 1) << 4
        if BITS == 6:
            word = tl.load(high + at * 2, mask=inside, other=0)[:, :, None]
            next_word = tl.load(high + at * 2 + 1, mask=inside, other=0)[:, :, None]
            low |= ((word >> (place[None, None, :] * 2)) & 3) << 4
            upper |= ((next_word >> (place[None, None, :] * 2)) & 3) << 4
    return low.to(tl.float32), upper.to(tl.float32)


@triton.jit
def _of_groups(table, row, block, blocks, inside, GROUP: tl.constexpr):
    """Two [rows, blocks] float32: a table's values for both halves of each block."""
    at = row.to(tl.int64)[:, None] * blocks + block[None, :]
    if GROUP == 32:
        low = tl.load(table + at, mask=inside, other=0.0).to(tl.float32)
        upper = low
    else:
        low = tl.load(table + at * 2, mask=inside, other=0.0).to(tl.float32)
        upper = tl.load(table + at * 2 + 1, mask=inside, other=0.0).to(tl.float32)
    return low, upper
