"""Matrices in tiles for the native kernels: quantised, or in bfloat16.

The layouts are documented in ``quantised_linear.c`` and ``bf16_linear.c``.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.kernels.arena import ALIGNMENT_BYTES, Arena
from llorch_worker.kernels.native.library import NativeKernels

TILE_ROWS = 16
BF16_BITS = 16
BLOCK_COLUMNS = 256
"""Columns of a block of the types with two levels of scales."""

Levels = Literal["none", "byte", "nibble", "six_bit"]
"""How a type stores the small numbers by which a block's scale and offset are multiplied."""

LEVEL_BYTES: dict[Levels, int] = {"none": 0, "byte": 16, "nibble": 16, "six_bit": 12}
"""Their bytes in a block, in the order of the numbers in ``scales.h``."""


class Matrix(ctypes.Structure):
    """A piece of a matrix; the fields are those of ``matrix.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "offsets", "scale_levels")),
        *((name, ctypes.c_int64) for name in ("outputs", "columns", "bits", "group", "zero")),
        *((name, ctypes.c_int64) for name in ("levels", "shared")),
    )


def tile_count(rows: int) -> int:
    """Tiles that hold ``rows`` rows."""
    return -(-rows // TILE_ROWS)


@dataclass(frozen=True)
class TileForm:
    """How quantised tiles keep ``weight = scale * (code - zero) + offset``."""

    bits: int
    """Of a code: 4 or 8."""
    group: int
    zero: int
    levels: Levels
    has_offsets: bool
    shared: int
    """Groups that share a scale: a power of 2, and 1 with levels."""

    @property
    def scale_columns(self) -> int:
        """Columns that share a float16 scale."""
        return self.group * self.shared if self.levels == "none" else BLOCK_COLUMNS


@dataclass(frozen=True)
class QuantisedTiles:
    """A quantised matrix, kept as codes, scales and offsets."""

    kernels: NativeKernels
    codes: torch.Tensor
    """[tiles, 16 * columns * bits / 8] uint8"""
    scales: torch.Tensor
    """[tiles, groups / shared, 16] float16; with levels one for each block instead"""
    offsets: torch.Tensor | None
    level_bytes: torch.Tensor | None
    """[tiles, blocks * bytes of a block / 4, 16, 4] uint8"""
    rows: int
    columns: int
    form: TileForm

    @staticmethod
    def bytes_of(form: TileForm, rows: int, columns: int) -> int:
        """The memory that a matrix of this size takes."""
        tables = 2 if form.has_offsets else 1
        halves = tables * columns // form.scale_columns * torch.float16.itemsize
        small = columns // BLOCK_COLUMNS * LEVEL_BYTES[form.levels]
        return tile_count(rows) * TILE_ROWS * (columns * form.bits // 8 + halves + small)

    @classmethod
    def empty(
        cls, kernels: NativeKernels, arena: Arena, form: TileForm, rows: int, columns: int
    ) -> QuantisedTiles:
        """Memory for a matrix, to be filled by ``pack``."""
        tiles = tile_count(rows)

        def table() -> torch.Tensor:
            width = columns // form.scale_columns
            return arena.zeros(tiles, width, TILE_ROWS, dtype=torch.float16)

        def level_bytes() -> torch.Tensor | None:
            words = columns // BLOCK_COLUMNS * LEVEL_BYTES[form.levels] // 4
            return arena.zeros(tiles, words, TILE_ROWS, 4, dtype=torch.uint8) if words else None

        return cls(
            kernels=kernels,
            codes=arena.zeros(tiles, TILE_ROWS * columns * form.bits // 8, dtype=torch.uint8),
            scales=table(),
            offsets=table() if form.has_offsets else None,
            level_bytes=level_bytes(),
            rows=rows,
            columns=columns,
            form=form,
        )

    def pack(
        self,
        first_row: int,
        codes: npt.NDArray[np.uint8],
        scales: npt.NDArray[np.float32],
        offsets: npt.NDArray[np.float32] | None,
        level_bytes: npt.NDArray[np.uint8] | None,
    ) -> None:
        """Fill rows from ``first_row``, a multiple of 16, on. Threads may fill different rows.

        ``codes``: [rows, columns]; ``scales``, ``offsets``: [rows, groups / shared], or with levels
        [rows, blocks]; ``level_bytes``: [rows, blocks * bytes of a block]. All are contiguous.
        """
        first = _first_tile(first_row)
        self.kernels.pack_codes(
            codes.ctypes.data,
            self.codes[first:].data_ptr(),
            len(codes),
            self.columns,
            self.form.bits,
            self.form.group,
        )
        for pack, values, tiles in (
            (self.kernels.pack_scales, scales, self.scales),
            (self.kernels.pack_scales, offsets, self.offsets),
            (self.kernels.pack_levels, level_bytes, self.level_bytes),
        ):
            if values is not None and tiles is not None:
                pack(values.ctypes.data, tiles[first:].data_ptr(), *values.shape)

    def pack_blocks(
        self, first_row: int, rows: npt.NDArray[np.uint8], order: npt.NDArray[np.int64] | None
    ) -> bool:
        """Like ``pack``, from raw rows of Q4_0 or Q8_0, whose codes are in the order of tiles.

        ``rows``: [rows, row bytes]; with an ``order``, row i is ``rows[order[i]]``. Returns whether
        all scales are finite.
        """
        first, form = _first_tile(first_row), self.form
        finite = self.kernels.pack_blocks(
            rows.ctypes.data,
            None if order is None else order.ctypes.data,
            self.codes[first:].data_ptr(),
            self.scales[first:].data_ptr(),
            len(rows),
            self.columns // form.group,
            form.group * form.bits // 8,
            0x80 if form.bits == 8 else 0,  # makes Q8_0's signed codes unsigned
            form.shared.bit_length() - 1,
        )
        return bool(finite)

    @property
    def nbytes(self) -> int:
        tables = (self.codes, self.scales, self.offsets, self.level_bytes)
        return sum(table.nbytes for table in tables if table is not None)

    def matrix(self) -> Matrix:
        """Its pointers, valid while this lives."""
        form = self.form
        return Matrix(
            self.codes.data_ptr(),
            self.scales.data_ptr(),
            None if self.offsets is None else self.offsets.data_ptr(),
            None if self.level_bytes is None else self.level_bytes.data_ptr(),
            self.rows,
            self.columns,
            form.bits,
            form.group,
            form.zero,
            list(LEVEL_BYTES).index(form.levels),
            form.shared.bit_length() - 1,
        )

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor, column: int) -> None:
        """Write ``x @ weight.T`` to the columns of ``out`` from ``column`` on.

        ``x``: [tokens, columns] bfloat16, contiguous; ``out``: [tokens, any] bfloat16 or float32.
        """
        tokens = len(x)
        threads = torch.get_num_threads()
        work_bytes = self.kernels.quantised_work_bytes(
            tokens, self.columns, self.form.bits, self.form.group, threads
        )
        work = torch.empty(work_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
        work_start = work.data_ptr()
        self.kernels.quantised_linear(
            ctypes.byref(self.matrix()),
            x.data_ptr(),
            out.data_ptr() + column * out.itemsize,
            out.stride(0),
            out.dtype is torch.float32,
            work_start + -work_start % ALIGNMENT_BYTES,
            tokens,
            threads,
        )


@dataclass(frozen=True)
class Bf16Tiles:
    """A bfloat16 matrix in tiles."""

    kernels: NativeKernels
    weights: torch.Tensor
    """[tiles * 16, columns], in tile order; rows beyond the last are 0."""
    rows: int

    @staticmethod
    def bytes_of(rows: int, columns: int) -> int:
        """The memory that a matrix of this size takes."""
        return tile_count(rows) * TILE_ROWS * columns * torch.bfloat16.itemsize

    @staticmethod
    def empty(arena: Arena, rows: int, columns: int) -> torch.Tensor:
        """Memory for ``pack_in_place``: [tiles * 16, columns], whose padding is 0."""
        return arena.zeros(tile_count(rows) * TILE_ROWS, columns, dtype=torch.bfloat16)

    @classmethod
    def pack_in_place(cls, kernels: NativeKernels, weights: torch.Tensor, rows: int) -> Bf16Tiles:
        """Reorder ``weights``, made by ``empty`` and filled row by row, into tiles."""
        columns = weights.shape[1]
        if columns % 2:
            raise ValueError(f"{columns} columns do not form pairs")
        threads = torch.get_num_threads()
        work = torch.empty(threads * TILE_ROWS * columns, dtype=torch.bfloat16)
        kernels.pack_bf16(
            weights.data_ptr(), work.data_ptr(), len(weights) // TILE_ROWS, columns, threads
        )
        return cls(kernels, weights, rows)

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def matrix(self) -> Matrix:
        """See ``QuantisedTiles.matrix``."""
        rows, columns = self.rows, self.weights.shape[1]
        return Matrix(self.weights.data_ptr(), None, None, None, rows, columns, BF16_BITS)

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor, column: int) -> None:
        """See ``QuantisedTiles.multiply_into``."""
        self.kernels.bf16_linear(
            ctypes.byref(self.matrix()),
            x.data_ptr(),
            out.data_ptr() + column * out.itemsize,
            out.stride(0),
            out.dtype is torch.float32,
            len(x),
            torch.get_num_threads(),
        )


def _first_tile(row: int) -> int:
    if row % TILE_ROWS:
        raise ValueError(f"row {row} is not the first of a tile")
    return row // TILE_ROWS
