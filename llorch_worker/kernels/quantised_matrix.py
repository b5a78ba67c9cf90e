"""A quantised matrix in the layout of the card's kernels, and its product in plain torch.

Every weight is ``factor * (scale * (code - zero) + offset)`` with one scale, and in some types one
offset, for each group of 16 or 32 columns. Without offsets, groups may have 64 or 128. Tables are
in the order in which a warp's tensor cores take them. A tile has 16 rows, a chunk 64 columns; both
are padded with weights of 0. Of each, lane 4 * g + t of a warp reads 16 bytes: for rows g and g + 8
and both halves of the chunk, the low four bits of columns 8 * t to 8 * t + 7, or of 4 * t to
4 * t + 3 of two groups of 16. Even columns are in the lower half of a word. The bits above the
fourth are in words of their own. There each byte belongs to two pairs of columns of each word of
codes, whose bits begin at the fourth bit and go on with the lowest, so that one shift takes those
of two pairs above their codes. Scales and offsets are 4 or 8 numbers for each g. Larger groups have
2 for each g, which serve one or two chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

BLOCK_COLUMNS = 32
TILE_ROWS = 16
CHUNK_COLUMNS = 64
_SMALL_GROUP = 16
_TABLES = ("codes", "high", "scales", "offsets")


@dataclass(frozen=True)
class QuantisedMatrix:
    """``[rows, columns]``; columns are a multiple of 32, all tensors are on one device."""

    codes: torch.Tensor
    """[tiles, chunks, 8 (g), 4 (t), 4] int32, the last: half of the chunk, then row g or g + 8"""
    high: torch.Tensor | None
    """[tiles, chunks, 8, 4, bits - 4] int32 where ``bits`` is above 4"""
    scales: torch.Tensor
    """[tiles, chunks, 8 (g), 128 / group] float16, the last: group, then row g or g + 8. Of groups
    of 64 or 128: [tiles, groups, 8, 2]"""
    offsets: torch.Tensor | None
    rows: int
    columns: int
    bits: int
    """4, 5, 6 or 8"""
    group: int
    zero: int
    factor: float

    @classmethod
    def pack(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        *,
        bits: int,
        zero: int,
        factor: float,
    ) -> QuantisedMatrix:
        """Pack ``codes``: [rows, columns] uint8, ``scales``, ``offsets``: [rows, columns / group]
        float32. The result is on the device of ``codes``."""
        rows, columns = codes.shape
        if columns % BLOCK_COLUMNS:
            raise ValueError(f"{columns} columns are not a multiple of {BLOCK_COLUMNS}")
        group = columns // scales.shape[1]
        blocks = _blocks(codes, group)
        return cls(
            codes=_nibbles(blocks & 15),
            high=_high(blocks >> 4, bits - 4),
            scales=_by_tile((scales / factor).to(torch.float16), group),
            offsets=None if offsets is None else _by_tile((offsets / factor).half(), group),
            rows=rows,
            columns=columns,
            bits=bits,
            group=group,
            zero=zero,
            factor=factor,
        )

    @classmethod
    def stack(cls, parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
        """The rows of all ``parts``, which have one form, stacked."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        if any(part.rows % TILE_ROWS for part in parts[:-1]):
            codes, scales, offsets = zip(*(part._unpacked() for part in parts), strict=True)
            return cls.pack(
                torch.cat(codes),
                torch.cat(scales),
                None if first.offsets is None else torch.cat(offsets),
                bits=first.bits,
                zero=first.zero,
                factor=first.factor,
            )
        tables = {name: [getattr(part, name) for part in parts] for name in _TABLES}
        joined: dict[str, Any] = {
            name: torch.cat(rows) for name, rows in tables.items() if rows[0] is not None
        }
        return replace(first, rows=sum(part.rows for part in parts), **joined)

    @staticmethod
    def bytes_of(rows: int, columns: int, *, bits: int, group: int, has_offsets: bool) -> int:
        """The memory that a matrix of this size takes."""
        tables = 2 if has_offsets else 1
        weights = _padded(rows, TILE_ROWS) * _padded(columns, CHUNK_COLUMNS)
        return weights * bits // 8 + tables * (weights // group) * 2

    @property
    def nbytes(self) -> int:
        tables = (getattr(self, name) for name in _TABLES)
        return sum(table.nbytes for table in tables if table is not None)

    def dequantise(self) -> torch.Tensor:
        """[rows, columns] float32."""
        codes, scales, offsets = self._unpacked()
        weights = (codes.view(self.rows, -1, self.group).float() - self.zero) * scales.unsqueeze(-1)
        if offsets is not None:
            weights += offsets.unsqueeze(-1)
        return weights.view(self.rows, -1)

    def _unpacked(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The arguments of ``pack``."""
        blocks = _from_nibbles(self.codes)
        if self.high is not None:
            blocks |= _from_high(self.high) << 4
        tiles = len(self.codes)
        # tile, chunk, g, t, half, r, h, q, e to tile, r, g, chunk, half, t and h, q, e
        blocks = blocks.unflatten(6, (2, 2))
        order = (6, 3) if self.group == _SMALL_GROUP else (3, 6)
        codes = blocks.permute(0, 5, 2, 1, 4, *order, 7, 8).reshape(tiles * TILE_ROWS, -1)

        def table(packed: torch.Tensor) -> torch.Tensor:
            grouped = packed.unflatten(3, (-1, 2)).permute(0, 4, 2, 1, 3)
            values: torch.Tensor = grouped.reshape(tiles * TILE_ROWS, -1).float() * self.factor
            return values[: self.rows, : self.columns // self.group]

        codes = codes[: self.rows, : self.columns].contiguous()
        return codes, table(self.scales), None if self.offsets is None else table(self.offsets)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _blocks(codes: torch.Tensor, group: int) -> torch.Tensor:
    """[rows, columns] to [tiles, chunks, g, t, half, r, pair, e], padded with 0."""
    rows, columns = codes.shape
    codes = F.pad(codes, (0, -columns % CHUNK_COLUMNS, 0, -rows % TILE_ROWS))
    tiles, chunks = codes.shape[0] // TILE_ROWS, codes.shape[1] // CHUNK_COLUMNS
    if group == _SMALL_GROUP:
        blocks = codes.view(tiles, 2, 8, chunks, 2, 2, 4, 2, 2).transpose(5, 6)
    else:
        blocks = codes.view(tiles, 2, 8, chunks, 2, 4, 2, 2, 2)
    return blocks.permute(0, 3, 2, 5, 4, 1, 6, 7, 8).flatten(6, 7)


def _nibbles(blocks: torch.Tensor) -> torch.Tensor:
    """Words of eight numbers below 16 each: [tiles, chunks, g, t, half * r]."""
    words = torch.zeros(blocks.shape[:6], dtype=torch.int32, device=blocks.device)
    for pair in range(4):
        for e in range(2):
            words |= blocks[..., pair, e].to(torch.int32) << (4 * pair + 16 * e)
    return words.flatten(4)


def _from_nibbles(words: torch.Tensor) -> torch.Tensor:
    shifts = torch.tensor([[4 * pair, 4 * pair + 16] for pair in range(4)], device=words.device)
    numbers: torch.Tensor = (words.unflatten(-1, (2, 2))[..., None, None] >> shifts) & 15
    return numbers.to(torch.uint8)


def _high(blocks: torch.Tensor, width: int) -> torch.Tensor | None:
    """The bits above the fourth: words of 4 * 8 / width numbers, [tiles, chunks, g, t, width]."""
    if width == 0:
        return None
    if width == 4:
        return _nibbles(blocks)
    each = blocks.flatten(4, 5).unflatten(4, (width, 4 // width))  # a word's parts last
    words = torch.zeros(each.shape[:5], dtype=torch.int32, device=blocks.device)
    for part in range(4 // width):
        for pair in range(4):
            for e in range(2):
                number = each[..., part, pair, e].to(torch.int32)
                words |= number << _high_place(width, part, pair, e)
    return words


def _high_place(width: int, part: int, pair: int, e: int) -> int:
    """Where the ``width`` high bits of a code begin in their word."""
    return 16 * e + 8 * (pair // 2) + (4 + width * (2 * part + pair % 2)) % 8


def _from_high(words: torch.Tensor) -> torch.Tensor:
    width = words.shape[-1]
    if width == 4:
        return _from_nibbles(words)
    places = [
        [[_high_place(width, part, pair, e) for e in range(2)] for pair in range(4)]
        for part in range(4 // width)
    ]
    numbers = words[..., None, None, None] >> torch.tensor(places, device=words.device)
    numbers = (numbers & ((1 << width) - 1)).to(torch.uint8).flatten(4, 5)
    return numbers.view(*numbers.shape[:4], 2, 2, 4, 2)


def _by_tile(table: torch.Tensor, group: int) -> torch.Tensor:
    """[rows, groups] to [tiles, chunks, g, groups of a chunk * r], padded with 0. A group of more
    columns than a chunk counts as one."""
    each = max(1, CHUNK_COLUMNS // group)
    table = F.pad(table, (0, -table.shape[1] % each, 0, -len(table) % TILE_ROWS))
    tiles, chunks = len(table) // TILE_ROWS, table.shape[1] // each
    grouped = table.view(tiles, 2, 8, chunks, each).permute(0, 3, 2, 4, 1)
    return grouped.reshape(tiles, chunks, 8, -1).contiguous()


def quantised_linear(
    x: torch.Tensor, matrix: QuantisedMatrix, out: torch.Tensor, column: int
) -> None:
    """``x: [tokens, columns]`` times the matrix to ``out[:, column : column + rows]``."""
    product = F.linear(x.float(), matrix.dequantise())
    out[:, column : column + matrix.rows] = product.to(out.dtype)
