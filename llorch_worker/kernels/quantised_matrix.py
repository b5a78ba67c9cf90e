"""A quantised matrix in the layout of the card's kernels, and its product in plain torch.

Every weight is ``factor * (scale * (code - zero) + offset)`` with one scale, and in some types one
offset, for each group of 16 or 32 columns. Codes lie in blocks of 32 columns: a byte holds the low
four bits of columns j and j + 16, so that both halves of a register of bytes are 16 neighbours.
The bits of a code above the fourth are in separate words; codes of 8 bits are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

BLOCK_COLUMNS = 32
_HALF = BLOCK_COLUMNS // 2
_TABLES = ("codes", "high", "scales", "offsets")


@dataclass(frozen=True)
class QuantisedMatrix:
    """``[rows, columns]``; columns are a multiple of 32, all tensors are on one device."""

    codes: torch.Tensor
    """uint8: [rows, columns / 2], or [rows, columns] where ``bits`` is 8"""
    high: torch.Tensor | None
    """int32 where ``bits`` is 5 or 6: [rows, columns / 32 * (bits - 4)]; word w of a block has
    the high bits of its columns, in order, from the lowest bit on."""
    scales: torch.Tensor
    """[rows, columns / group] float16"""
    offsets: torch.Tensor | None
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
        high = None
        if bits < 8:
            blocks = codes.view(rows, -1, 2, _HALF)
            if bits > 4:
                high = _high_bits(codes.view(rows, -1, BLOCK_COLUMNS), bits - 4)
            codes = ((blocks[:, :, 0] & 15) | (blocks[:, :, 1] << 4)).view(rows, -1)
        return cls(
            codes=codes,
            high=high,
            scales=(scales / factor).to(torch.float16),
            offsets=None if offsets is None else (offsets / factor).to(torch.float16),
            bits=bits,
            group=columns // scales.shape[1],
            zero=zero,
            factor=factor,
        )

    @classmethod
    def stack(cls, parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
        """The rows of all ``parts``, which have one form, stacked."""
        if len(parts) == 1:
            return parts[0]
        tables = {name: [getattr(part, name) for part in parts] for name in _TABLES}
        joined: dict[str, Any] = {
            name: torch.cat(rows) for name, rows in tables.items() if rows[0] is not None
        }
        return replace(parts[0], **joined)

    @staticmethod
    def bytes_of(rows: int, columns: int, *, bits: int, group: int, has_offsets: bool) -> int:
        """The memory that a matrix of this size takes."""
        tables = 2 if has_offsets else 1
        return rows * (columns * bits // 8 + tables * (columns // group) * 2)

    @property
    def nbytes(self) -> int:
        tables = (getattr(self, name) for name in _TABLES)
        return sum(table.nbytes for table in tables if table is not None)

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * (1 if self.bits == 8 else 2)

    def dequantise(self) -> torch.Tensor:
        """[rows, columns] float32."""
        rows = self.rows
        codes = self.codes
        if self.bits < 8:
            halves = (codes & 15, codes >> 4)
            blocks = torch.stack([half.view(rows, -1, _HALF) for half in halves], dim=2)
            codes = blocks.view(rows, -1)
        if self.high is not None:
            codes = codes | (self._high_codes() << 4)
        grouped = codes.view(rows, -1, self.group).float() - self.zero
        weights = grouped * self.scales.float().unsqueeze(-1)
        if self.offsets is not None:
            weights += self.offsets.float().unsqueeze(-1)
        return weights.view(rows, -1) * self.factor

    def _high_codes(self) -> torch.Tensor:
        """[rows, columns] uint8, the bits of each code above the fourth."""
        assert self.high is not None
        width = self.bits - 4
        shifts = torch.arange(0, 32, width, device=self.high.device)
        fields = (self.high.unsqueeze(-1) >> shifts) & ((1 << width) - 1)
        return fields.to(torch.uint8).view(self.rows, -1)


def _high_bits(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """The ``width`` bits above the fourth of ``blocks``: [rows, blocks, 32], as words."""
    each = 32 // width
    words = blocks.view(*blocks.shape[:2], width, each)
    packed = torch.zeros(words.shape[:3], dtype=torch.int32, device=blocks.device)
    for place in range(each):
        packed |= (words[..., place].to(torch.int32) >> 4) << (place * width)
    return packed.flatten(1)


def quantised_linear(
    x: torch.Tensor, matrix: QuantisedMatrix, out: torch.Tensor, column: int
) -> None:
    """``x: [tokens, columns]`` times the matrix to ``out[:, column : column + rows]``."""
    product = F.linear(x.float(), matrix.dequantise())
    out[:, column : column + matrix.rows] = product.to(out.dtype)
