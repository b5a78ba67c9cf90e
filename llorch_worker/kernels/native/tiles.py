"""Matrices in tiles for the native kernels: quantised, or in bfloat16.

The layouts are documented in ``quantised_linear.c`` and ``bf16_linear.c``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.kernels.arena import ALIGNMENT_BYTES, Arena
from llorch_worker.kernels.native.library import NativeKernels

TILE_ROWS = 16


def tile_count(rows: int) -> int:
    """Tiles that hold ``rows`` rows."""
    return -(-rows // TILE_ROWS)


@dataclass(frozen=True)
class QuantisedTiles:
    """``weight = factor * (scale * (code - zero) + offset)``, kept as codes, scales and offsets."""

    kernels: NativeKernels
    codes: torch.Tensor
    """[tiles, 16 * columns * bits / 8] uint8"""
    scales: torch.Tensor
    """[tiles, groups, 16] float16"""
    offsets: torch.Tensor | None
    factor: float
    rows: int
    columns: int
    bits: int
    group: int
    zero: int

    @staticmethod
    def bytes_of(rows: int, columns: int, *, bits: int, group: int, has_offsets: bool) -> int:
        """The memory that a matrix of this size takes."""
        tables = 2 if has_offsets else 1
        padded = tile_count(rows) * TILE_ROWS
        return padded * (columns * bits // 8 + tables * columns // group * torch.float16.itemsize)

    @classmethod
    def empty(
        cls,
        kernels: NativeKernels,
        arena: Arena,
        rows: int,
        columns: int,
        *,
        bits: int,
        group: int,
        zero: int,
        has_offsets: bool,
        factor: float,
    ) -> QuantisedTiles:
        """Memory for a matrix, to be filled by ``pack``; scales are kept over ``factor``."""
        tiles = tile_count(rows)

        def table() -> torch.Tensor:
            return arena.empty(tiles, columns // group, TILE_ROWS, dtype=torch.float16)

        return cls(
            kernels=kernels,
            codes=arena.empty(tiles, TILE_ROWS * columns * bits // 8, dtype=torch.uint8),
            scales=table(),
            offsets=table() if has_offsets else None,
            factor=factor,
            rows=rows,
            columns=columns,
            bits=bits,
            group=group,
            zero=zero,
        )

    def pack(
        self,
        first_row: int,
        codes: npt.NDArray[np.uint8],
        scales: npt.NDArray[np.float32],
        offsets: npt.NDArray[np.float32] | None,
    ) -> None:
        """Fill rows from ``first_row``, a multiple of 16, on. Threads may fill different rows.

        ``codes``: [rows, columns]; ``scales``, ``offsets``: [rows, columns / group], contiguous.
        """
        first = _first_tile(first_row)
        self.kernels.pack_codes(
            codes.ctypes.data,
            self.codes[first:].data_ptr(),
            len(codes),
            self.columns,
            self.bits,
            self.group,
        )
        for values, tiles in ((scales, self.scales), (offsets, self.offsets)):
            if values is not None and tiles is not None:
                self.kernels.pack_scales(
                    values.ctypes.data,
                    tiles[first:].data_ptr(),
                    len(values),
                    self.columns // self.group,
                    self.factor,
                )

    def pack_blocks(
        self, first_row: int, rows: npt.NDArray[np.uint8], order: npt.NDArray[np.int64] | None
    ) -> bool:
        """Like ``pack``, from raw rows of Q4_0 or Q8_0, whose codes are in the order of tiles.

        ``rows``: [rows, row bytes]; with an ``order``, row i is ``rows[order[i]]``. Returns whether
        all scales are finite.
        """
        first = _first_tile(first_row)
        finite = self.kernels.pack_blocks(
            rows.ctypes.data,
            None if order is None else order.ctypes.data,
            self.codes[first:].data_ptr(),
            self.scales[first:].data_ptr(),
            len(rows),
            self.columns // self.group,
            self.group * self.bits // 8,
            0x80 if self.bits == 8 else 0,  # makes Q8_0's signed codes unsigned
        )
        return bool(finite)

    @property
    def nbytes(self) -> int:
        tables = self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)
        return self.codes.nbytes + tables

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor, column: int) -> None:
        """Write ``x @ weight.T`` to the columns of ``out`` from ``column`` on.

        ``x``: [tokens, columns] bfloat16, contiguous; ``out``: [tokens, any] bfloat16 or float32.
        """
        tokens = len(x)
        threads = torch.get_num_threads()
        work_bytes = self.kernels.quantised_work_bytes(
            tokens, self.columns, self.bits, self.group, threads
        )
        work = torch.empty(work_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
        work_start = work.data_ptr()
        self.kernels.quantised_linear(
            x.data_ptr(),
            self.codes.data_ptr(),
            self.scales.data_ptr(),
            None if self.offsets is None else self.offsets.data_ptr(),
            out.data_ptr() + column * out.itemsize,
            out.stride(0),
            out.dtype is torch.float32,
            work_start + -work_start % ALIGNMENT_BYTES,
            tokens,
            self.rows,
            self.columns,
            self.bits,
            self.group,
            self.zero,
            self.factor,
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
        weights = arena.empty(tile_count(rows) * TILE_ROWS, columns, dtype=torch.bfloat16)
        weights[rows:] = 0
        return weights

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

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor, column: int) -> None:
        """See ``QuantisedTiles.multiply_into``."""
        self.kernels.bf16_linear(
            x.data_ptr(),
            self.weights.data_ptr(),
            out.data_ptr() + column * out.itemsize,
            out.stride(0),
            out.dtype is torch.float32,
            len(x),
            self.rows,
            self.weights.shape[1],
            torch.get_num_threads(),
        )


def _first_tile(row: int) -> int:
    if row % TILE_ROWS:
        raise ValueError(f"row {row} is not the first of a tile")
    return row // TILE_ROWS
