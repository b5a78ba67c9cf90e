"""Products with quantised matrices.

For up to 64 tokens, codes become numbers of the activations' dtype by placing their bits in the
mantissa of a constant, and tensor cores multiply them. The constant and the type's zero are
subtracted from the sums of groups, and scales are applied there, in float32. The warps of a program
divide the columns; each loads what its own lanes multiply, so that nothing crosses lanes or waits
for another warp until the end. No sum depends on how many tokens there are.

For more tokens, rows are dequantised once into the activations' dtype, and the library multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from llorch_worker.kernels.quantised_matrix import CHUNK_COLUMNS, TILE_ROWS, QuantisedMatrix
from llorch_worker.kernels.triton.attention_tiles import MAX_REGISTERS

_PARTS = 8
MOST_TOKENS = 64
"""Of a product with codes; beyond, dequantising costs less than it saves."""
_SLICE_BYTES = 64 * 2**20
"""Of dequantised rows at once."""
_CODE_BITS = 4
_DEQUANTISED_CHUNKS = 4


@dataclass(frozen=True)
class ProductTiles:
    """The part of a product that one program computes. No result depends on it."""

    tokens: int
    tiles: int
    """Of 16 rows."""

    @classmethod
    def of(cls, tokens: int, rows: int, processors: int) -> ProductTiles:
        """Two tiles share what they load of the activations, unless each tile could have a
        processor of its own."""
        wanted = min(32, max(8, triton.next_power_of_2(tokens)))
        return cls(wanted, 2 if wanted < 32 and rows > TILE_ROWS * processors else 1)


def quantised_linear(
    x: torch.Tensor,
    matrix: QuantisedMatrix,
    out: torch.Tensor,
    column: int,
    *,
    batch_invariant: bool = False,
) -> None:
    """See ``kernels.quantised_matrix.quantised_linear``, its twin; ``x`` has 16 bits a number.

    With ``batch_invariant`` a token's rounding is the same in every batch.
    """
    tokens = len(x)
    if tokens > MOST_TOKENS and not batch_invariant:
        rows = max(TILE_ROWS, _SLICE_BYTES // (x.itemsize * matrix.columns) // 256 * 256)
        for first in range(0, matrix.rows, rows):
            weight = dequantise(matrix, x.dtype, first, min(first + rows, matrix.rows))
            part = out[:, column + first : column + first + len(weight)]
            part.copy_(x @ weight.t())
        return
    tiles = ProductTiles.of(tokens, matrix.rows, _processors(x.device))
    grid = (
        triton.cdiv(len(matrix.codes), tiles.tiles),
        triton.cdiv(tokens, tiles.tokens),
    )
    _multiply[grid](
        x,
        *_tables(matrix),
        out[:, column:],
        matrix.factor,
        tokens,
        matrix.rows,
        matrix.columns,
        x.stride(0),
        out.stride(0),
        TOKENS=tiles.tokens,
        TILES=tiles.tiles,
        PARTS=_PARTS,
        **_form(matrix),
        num_warps=_PARTS,
        num_stages=1,
        maxnreg=MAX_REGISTERS,
    )


def dequantise(matrix: QuantisedMatrix, dtype: torch.dtype, first: int, end: int) -> torch.Tensor:
    """Rows ``first`` (of a tile's 16 the first) to ``end``: [end - first, columns]."""
    out = torch.empty(end - first, matrix.columns, dtype=dtype, device=matrix.codes.device)
    chunks = matrix.codes.shape[1]
    grid = (triton.cdiv(len(out), TILE_ROWS), triton.cdiv(chunks, _DEQUANTISED_CHUNKS))
    tables = [table[first // TILE_ROWS :] for table in _tables(matrix)]
    _dequantise[grid](
        *tables,
        out,
        matrix.factor,
        len(out),
        matrix.columns,
        PARTS=_DEQUANTISED_CHUNKS,
        **_form(matrix),
        num_warps=_DEQUANTISED_CHUNKS,
    )
    return out


def _tables(matrix: QuantisedMatrix) -> list[torch.Tensor]:
    high = matrix.codes if matrix.high is None else matrix.high
    offsets = matrix.scales if matrix.offsets is None else matrix.offsets
    return [matrix.codes, high, matrix.scales, offsets]


def _form(matrix: QuantisedMatrix) -> dict[str, Any]:
    return {
        "HIGH": matrix.bits - _CODE_BITS,
        "GROUPS": max(1, 32 // matrix.group),
        "CHUNKS": matrix.group // CHUNK_COLUMNS,
        "ZERO": matrix.zero,
        "OFFSETS": matrix.offsets is not None,
    }


@lru_cache
def _processors(device: torch.device) -> int:
    """The card's streaming multiprocessors; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


# The number of tokens must not create variants: steps would wait for compilation.
@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    x,
    codes,
    high,
    scales,
    offsets,
    out,
    factor,
    tokens,
    rows,
    columns,
    x_stride,
    out_stride,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    HIGH: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Some tiles of 16 rows and some tokens; each part, a warp's, takes every PARTS-th chunk.

    GROUPS: of 32 columns. CHUNKS: that share a scale, 0 for none. In the shapes below, T is TILES,
    P is PARTS and N is TOKENS.
    """
    ROWS: tl.constexpr = 16 * TILES
    BATCH: tl.constexpr = 2 * GROUPS * PARTS
    IN_GROUP: tl.constexpr = 32 // GROUPS
    EACH: tl.constexpr = 8 // GROUPS
    EIGHTS: tl.constexpr = TOKENS // 8
    dtype = x.dtype.element_ty
    chunks = tl.cdiv(columns, 64)
    part = tl.arange(0, PARTS)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    real = (tile * 16 < rows)[:, None]
    lane, of_g = _lanes()
    at = tile.to(tl.int64)[:, None] * chunks + part[None, :]  # [T, P]
    codes += _places(at, lane, 32, 4)
    scales += _scale_places(tile, part, chunks, of_g, GROUPS, CHUNKS)
    offsets += _places(at, of_g, 8, 4 * GROUPS)
    if HIGH:
        high += _places(at, lane, 32, HIGH)

    # Of two numbers with a code as the last bits of their mantissas. An instruction takes no two
    # constants, and the mask of the codes is one. So 0 is added that no compiler knows to be 0, and
    # that differs by thread as far as it knows, which leaves the exponents in a register.
    exponents = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
    exponents += ((tokens + lane) >> 31)[None, None, :, :, None]

    block = tl.arange(0, 2 * GROUPS * EIGHTS)  # eight tokens, then a part of a chunk
    token = (block // (2 * GROUPS) * 8)[:, None] + tl.arange(0, 8)[None, :]
    token += tl.program_id(1) * TOKENS
    column = (block % (2 * GROUPS) * IN_GROUP)[:, None] + part[None, :] * 64
    x += token.to(tl.int64)[:, None, :, None] * x_stride
    x += column[:, :, None, None] + tl.arange(0, 4) * EACH
    x = x[:, :, :, :, None] + tl.arange(0, EACH)
    is_token = (token < tokens)[:, None, :, None, None]

    total = tl.zeros([BATCH, ROWS, TOKENS], tl.float32)
    # Twice, so that the second pass's loads are in flight while the first multiplies, as far as
    # registers go.
    MOST: tl.constexpr = 8 if OFFSETS and GROUPS == 2 else 16
    UNROLLED: tl.constexpr = 2 if TOKENS <= MOST else 1
    for first in tl.range(0, chunks, PARTS, loop_unroll_factor=UNROLLED):
        known = (real & (first + part < chunks)[None, :])[:, :, None, None, None]
        low = tl.load(codes, mask=known, other=0)
        weights = _numbers(low, exponents, dtype)  # [T, P, 8, 4, half r, e q h]
        if HIGH == 4:
            # Of numbers 16 times as large.
            sixteens = exponents + (0x02000200 if dtype == tl.bfloat16 else 0x10001000)
            above = _numbers(tl.load(high, mask=known, other=0), sixteens, dtype)
        elif HIGH:
            # Without the hint, a lane would load what its neighbours multiply.
            words = tl.load(tl.max_contiguous(high, [1, 1, 1, 1, HIGH]), mask=known, other=0)
            words = _each_word(words, TILES, PARTS, HIGH)
            weights = _numbers_with_high(low, words, HIGH, exponents, dtype)
        inside = is_token & (column + first * 64 < columns)[:, :, None, None, None]
        here = tl.load(x, mask=inside, other=0.0)  # [N / 8 * 2 * GROUPS, P, 8, 4 (t), 8 / GROUPS]
        if GROUPS == 1:
            here = tl.reshape(here, [EIGHTS, 2, PARTS, 8, 4, 2, 2, 2])  # n half P n t h q e
            here = tl.permute(here, (1, 2, 5, 6, 4, 7, 0, 3))  # half P, h q t e, n n
        else:
            here = tl.reshape(here, [EIGHTS, 2, 2, PARTS, 8, 4, 2, 2])  # n half h P n t q e
            here = tl.permute(here, (1, 2, 3, 6, 5, 7, 0, 4))  # half h P, q t e, n n
        here = tl.reshape(here, [BATCH, IN_GROUP, TOKENS])
        # The sums of all columns, in every row, for the constants that are in each code.
        ones = tl.full([BATCH, 16, IN_GROUP], 1.0, dtype)
        sums = tl.reshape(tl.dot(ones, here), [BATCH, 1, 16, TOKENS])
        sums = tl.broadcast_to(sums, [BATCH, TILES, 16, TOKENS])
        sums = tl.reshape(sums, [BATCH, ROWS, TOKENS])

        scale = tl.load(scales, mask=known, other=0.0).to(tl.float32)
        if CHUNKS:
            scale = _each_half(scale, TILES, PARTS)
        constant = -(_constant(dtype, HIGH == 4) + ZERO)
        operand = _operand(weights, TILES, PARTS, GROUPS)
        # Where sums are needed anyway, a second set of them would take too many registers.
        products = tl.dot(operand, here) if OFFSETS else tl.dot(operand, here, sums * constant)
        if HIGH == 4:
            products = tl.dot(_operand(above, TILES, PARTS, GROUPS), here, products)
        total += products * _of_groups(scale, TILES, PARTS, GROUPS, TOKENS)
        if OFFSETS:
            bias = constant * scale + tl.load(offsets, mask=known, other=0.0).to(tl.float32)
            total += sums * _of_groups(bias, TILES, PARTS, GROUPS, TOKENS)
        codes += PARTS * 128
        scales += PARTS // CHUNKS * 16 if CHUNKS else PARTS * 32 * GROUPS
        offsets += PARTS * 32 * GROUPS
        if HIGH:
            high += PARTS * 32 * HIGH
        x += PARTS * 64

    summed = tl.sum(total, axis=0) * factor  # [ROWS, N]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token_of = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    tl.store(
        out + token_of.to(tl.int64)[None, :] * out_stride + row[:, None],
        summed.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (token_of < tokens)[None, :],
    )


@triton.jit
def _dequantise(
    codes,
    high,
    scales,
    offsets,
    out,
    factor,
    rows,
    columns,
    PARTS: tl.constexpr,
    HIGH: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """A tile of 16 rows and PARTS chunks."""
    chunks = tl.cdiv(columns, 64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    at = (tl.program_id(0).to(tl.int64) * chunks + part)[None, :]
    known = (part < chunks)[None, :, None, None, None]
    lane, of_g = _lanes()
    low = tl.load(codes + _places(at, lane, 32, 4), mask=known, other=0)
    weights = _numbers(low, 0x43004300, tl.bfloat16).to(tl.float32)
    if HIGH == 4:
        above = tl.load(high + _places(at, lane, 32, HIGH), mask=known, other=0)
        weights += _numbers(above, 0x45004500, tl.bfloat16).to(tl.float32)
    elif HIGH:
        words = tl.load(high + _places(at, lane, 32, HIGH), mask=known, other=0)
        words = _each_word(words, 1, PARTS, HIGH)
        weights = _numbers_with_high(low, words, HIGH, 0x43004300, tl.bfloat16).to(tl.float32)
    weights -= _constant(tl.bfloat16, HIGH == 4) + ZERO
    groups = _scale_places(tl.program_id(0) + tl.arange(0, 1), part, chunks, of_g, GROUPS, CHUNKS)
    scale = tl.load(scales + groups, mask=known, other=0.0).to(tl.float32)
    if CHUNKS:
        scale = _each_half(scale, 1, PARTS)
    weights *= _of_weights(scale, PARTS, GROUPS)
    if OFFSETS:
        offset = tl.load(offsets + groups, mask=known, other=0.0).to(tl.float32)
        weights += _of_weights(offset, PARTS, GROUPS)
    weights = tl.reshape(weights, [PARTS, 8, 4, 2, 2, 2, 2, 2])  # P g t half r e q h
    if GROUPS == 1:
        weights = tl.permute(weights, (4, 1, 0, 3, 2, 7, 6, 5))  # r g, P half t h q e
    else:
        weights = tl.permute(weights, (4, 1, 0, 3, 7, 2, 6, 5))  # r g, P half h t q e
    weights = tl.reshape(weights * factor, [16, PARTS * 64])
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    column = tl.program_id(1) * PARTS * 64 + tl.arange(0, PARTS * 64)
    tl.store(
        out + row.to(tl.int64)[:, None] * columns + column[None, :],
        weights.to(out.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < columns)[None, :],
    )


@triton.jit
def _lanes():
    """[8, 4]: the lane of a warp by g and t; and its g, which all four t read."""
    g = tl.arange(0, 8)[:, None]
    t = tl.arange(0, 4)[None, :]
    return g * 4 + t, g + 0 * t


@triton.jit
def _places(at, lane, LANES: tl.constexpr, EACH: tl.constexpr):
    """[T, P, 8, 4, EACH]: where each lane's numbers are in a table, of tiles and chunks ``at``."""
    first = at[:, :, None, None] * LANES + lane[None, None, :, :]
    return first[:, :, :, :, None] * EACH + tl.arange(0, EACH)


@triton.jit
def _scale_places(tile, part, chunks, of_g, GROUPS: tl.constexpr, CHUNKS: tl.constexpr):
    """``_places`` of the scales of these tiles and parts, as many for each g as a chunk has."""
    tile = tile.to(tl.int64)[:, None]
    if CHUNKS:
        at = tile * (chunks // CHUNKS) + (part // CHUNKS)[None, :]
    else:
        at = tile * chunks + part[None, :]
    return _places(at, of_g, 8, 2 if CHUNKS else 4 * GROUPS)


@triton.jit
def _each_half(scale, TILES: tl.constexpr, PARTS: tl.constexpr):
    """[T, P, 8, 4, 2], for two rows, to those of both halves of a chunk: [T, P, 8, 4, 4]."""
    scale = tl.reshape(scale, [TILES, PARTS, 8, 4, 1, 2])
    scale = tl.broadcast_to(scale, [TILES, PARTS, 8, 4, 2, 2])
    return tl.reshape(scale, [TILES, PARTS, 8, 4, 4])


@triton.jit
def _each_word(words, TILES: tl.constexpr, PARTS: tl.constexpr, HIGH: tl.constexpr):
    """[T, P, 8, 4, HIGH] to those with the high bits of each word of codes: [T, P, 8, 4, 4]."""
    words = tl.reshape(words, [TILES, PARTS, 8, 4, HIGH, 1])
    words = tl.broadcast_to(words, [TILES, PARTS, 8, 4, HIGH, 4 // HIGH])
    return tl.reshape(words, [TILES, PARTS, 8, 4, 4])


@triton.jit
def _constant(dtype, TWICE: tl.constexpr):
    """What ``_numbers`` adds to a code of up to 7 bits; of 8 bits, to both halves."""
    constant = 128.0 if dtype == tl.bfloat16 else 1024.0
    return constant * 17.0 if TWICE else constant


@triton.jit
def _numbers(words, exponents, dtype: tl.constexpr):
    """Eight codes of each word as numbers plus a constant: [..., 2 (e), 2, 2]."""
    return _eight(
        words & 0x000F000F,
        (words >> 4) & 0x000F000F,
        (words >> 8) & 0x000F000F,
        (words >> 12) & 0x000F000F,
        exponents,
        dtype,
    )


@triton.jit
def _numbers_with_high(words, high, WIDTH: tl.constexpr, exponents, dtype: tl.constexpr):
    """As ``_numbers``, with ``WIDTH`` more bits of each code; see ``quantised_matrix``."""
    mask: tl.constexpr = 0x001F001F if WIDTH == 1 else 0x003F003F
    place = tl.arange(0, 4) % (4 // WIDTH) * 2
    even = _joined(words, _to_fourth_bit(high, place, WIDTH))
    odd = _joined(words >> 4, _to_fourth_bit(high, place + 1, WIDTH))
    return _eight(even & mask, odd & mask, (even >> 8) & mask, (odd >> 8) & mask, exponents, dtype)


@triton.jit
def _to_fourth_bit(high, place, WIDTH: tl.constexpr):
    """Moves the bits at ``place`` of each byte above its lower four."""
    return tl.where(place < 4 // WIDTH, high >> (WIDTH * place), high << (8 - WIDTH * place))


@triton.jit
def _joined(low, high):
    """The lower four bits of each byte of ``low``, the upper four of ``high``."""
    return (low & 0x0F0F0F0F) | (high & -0x0F0F0F10)


@triton.jit
def _eight(first, second, third, fourth, exponents, dtype: tl.constexpr):
    return tl.join(
        tl.join(_two(first, exponents, dtype), _two(second, exponents, dtype)),
        tl.join(_two(third, exponents, dtype), _two(fourth, exponents, dtype)),
    )


@triton.jit
def _two(pair, exponents, dtype: tl.constexpr):
    """The halves of a word, each the low bits of a mantissa."""
    pair = pair | exponents
    low = (pair & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = ((pair >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _operand(weights, TILES: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    """[T, P, 8, 4, 4, 2, 2, 2] as the left operand of a product for each group: [BATCH, ROWS, K].

    All of it lies in the registers where tensor cores want it.
    """
    weights = tl.reshape(weights, [TILES, PARTS, 8, 4, 2, 2, 2, 2, 2])  # T P g t half r e q h
    if GROUPS == 1:
        weights = tl.permute(weights, (4, 1, 0, 5, 2, 8, 7, 3, 6))  # half P, T r g, h q t e
    else:
        weights = tl.permute(weights, (4, 8, 1, 0, 5, 2, 7, 3, 6))  # half h P, T r g, q t e
    return tl.reshape(weights, [2 * GROUPS * PARTS, 16 * TILES, 32 // GROUPS])


@triton.jit
def _of_groups(
    values, TILES: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr
):
    """[T, P, 8, 4, 4 * GROUPS], the same for all t, as a factor of products: [BATCH, ROWS, N]."""
    values = tl.join(values, values)
    if TOKENS > 8:
        values = tl.join(values, values)
    if TOKENS > 16:
        values = tl.join(values, values)
    # T P g t half h r e n to half h P, T r g, n t e
    values = tl.reshape(values, [TILES, PARTS, 8, 4, 2, GROUPS, 2, 2, TOKENS // 8])
    values = tl.permute(values, (4, 5, 1, 0, 6, 2, 8, 3, 7))
    return tl.reshape(values, [2 * GROUPS * PARTS, 16 * TILES, TOKENS])


@triton.jit
def _of_weights(values, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    """[1, P, 8, 4, 4 * GROUPS] as a factor of weights: [1, P, 8, 4, 4, 2, 2, 2]."""
    values = tl.reshape(values, [1, PARTS, 8, 4, 2, GROUPS, 2])
    values = tl.permute(values, (0, 1, 2, 3, 4, 6, 5))  # half r h
    if GROUPS == 1:
        values = tl.join(values, values)
    else:
        values = tl.reshape(values, [1, PARTS, 8, 4, 2, 2, 1, 2])
    values = tl.reshape(values, [1, PARTS, 8, 4, 4, 1, 1, 2])
    return tl.broadcast_to(values, [1, PARTS, 8, 4, 4, 2, 2, 2])
