"""Matrices in tiles for the native kernels: quantised ones as they are, others in bfloat16.

The layouts are explained in ``quantised_linear.c`` and ``bf16_linear.c``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.kernels.arena import ALIGNMENT_BYTES, Arena
from llorch_worker.kernels.native.library import Float, Int, Long, Pointer, native_library

TILE_ROWS = 16


def tile_count(rows: int) -> int:
    """Tiles that hold ``rows`` rows."""
    return -(-rows // TILE_ROWS)


@dataclass(frozen=True)
class QuantisedTiles:
    """``weight = factor * (scale * (code - zero) + offset)``, kept as codes, scales and offsets."""

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
        """What ``pack`` will keep of a matrix of this size."""
        tables = 2 if has_offsets else 1
        padded = tile_count(rows) * TILE_ROWS
        return padded * (columns * bits // 8 + tables * columns // group * torch.float16.itemsize)

    @classmethod
    def empty(
        cls,
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
        """Room for a matrix, to be filled with ``pack``; scales are kept without ``factor``."""
        tiles = tile_count(rows)

        def table() -> torch.Tensor:
            return arena.empty(tiles, columns // group, TILE_ROWS, dtype=torch.float16)

        return cls(
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
        """Fill some rows, from a multiple of 16 on. Several threads may fill rows of their own.

        ``codes``: [rows, columns]; ``scales``, ``offsets``: [rows, columns / group], contiguous.
        """
        first = _first_tile(first_row)
        functions = _functions()
        functions.pack_codes(
            codes.ctypes.data,
            self.codes[first:].data_ptr(),
            len(codes),
            self.columns,
            self.bits,
            self.group,
        )
        for values, tiles in ((scales, self.scales), (offsets, self.offsets)):
            if values is not None and tiles is not None:
                functions.pack_scales(
                    values.ctypes.data,
                    tiles[first:].data_ptr(),
                    len(values),
                    self.columns // self.group,
                    self.factor,
                )

    def pack_blocks(
        self, first_row: int, rows: npt.NDArray[np.uint8], order: npt.NDArray[np.int64] | None
    ) -> bool:
        """As ``pack``, from raw rows of Q4_0 or Q8_0, whose codes lie as tiles want them.

        ``rows``: [rows, row bytes]; with an ``order``, row i is ``rows[order[i]]``. Returns whether
        all scales are finite.
        """
        first = _first_tile(first_row)
        finite = _functions().pack_blocks(
            rows.ctypes.data,
            None if order is None else order.ctypes.data,
            self.codes[first:].data_ptr(),
            self.scales[first:].data_ptr(),
            len(rows),
            self.columns // self.group,
            self.group * self.bits // 8,
            0x80 if self.bits == 8 else 0,  # Q8_0's codes are signed; here they count from 0
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
        functions = _functions()
        tokens = len(x)
        work_bytes = functions.quantised_work_bytes(tokens, self.columns, self.group)
        work = torch.empty(work_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
        work_start = work.data_ptr()
        functions.quantised_linear(
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
            torch.get_num_threads(),
        )


@dataclass(frozen=True)
class Bf16Tiles:
    """A bfloat16 matrix in tiles."""

    weights: torch.Tensor
    """[tiles * 16, columns], whose values lie in tile order; rows beyond the last are 0."""
    rows: int

    @staticmethod
    def bytes_of(rows: int, columns: int) -> int:
        """What a matrix of this size takes."""
        return tile_count(rows) * TILE_ROWS * columns * torch.bfloat16.itemsize

    @staticmethod
    def empty(arena: Arena, rows: int, columns: int) -> torch.Tensor:
        """Room for a matrix that ``pack_in_place`` will take: [tiles * 16, columns], padded."""
        weights = arena.empty(tile_count(rows) * TILE_ROWS, columns, dtype=torch.bfloat16)
        weights[rows:] = 0
        return weights

    @classmethod
    def pack_in_place(cls, weights: torch.Tensor, rows: int) -> Bf16Tiles:
        """Bring ``weights``, from ``empty`` and then filled row by row, into tile order."""
        columns = weights.shape[1]
        if columns % 2:
            raise ValueError(f"{columns} columns cannot be taken in pairs")
        threads = torch.get_num_threads()
        work = torch.empty(threads * TILE_ROWS * columns, dtype=torch.bfloat16)
        _functions().pack_bf16(
            weights.data_ptr(), work.data_ptr(), len(weights) // TILE_ROWS, columns, threads
        )
        return cls(weights, rows)

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor, column: int) -> None:
        """As ``QuantisedTiles.multiply_into``."""
        _functions().bf16_linear(
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
        raise ValueError(f"row {row} is within a tile")
    return row // TILE_ROWS


@dataclass(frozen=True)
class _Functions:
    """The C functions; their arguments are named where they are defined."""

    pack_codes: Callable[..., None]
    pack_scales: Callable[..., None]
    pack_blocks: Callable[..., int]
    quantised_work_bytes: Callable[..., int]
    quantised_linear: Callable[..., None]
    pack_bf16: Callable[..., None]
    bf16_linear: Callable[..., None]


@functools.cache
def _functions() -> _Functions:
    function = native_library().function
    target = (Pointer, Long, Int)  # where results go: data, stride, wide
    sizes = (Long, Long, Long)
    return _Functions(
        pack_codes=function("llorch_pack_codes", Pointer, Pointer, Long, Long, Int, Int),
        pack_scales=function("llorch_pack_scales", Pointer, Pointer, Long, Long, Float),
        pack_blocks=function("llorch_pack_blocks", *[Pointer] * 4, *[Long] * 3, Int, result=Int),
        quantised_work_bytes=function("llorch_quantised_work_bytes", Long, Long, Long, result=Long),
        quantised_linear=function(
            "llorch_quantised_linear",
            *(Pointer, Pointer, Pointer, Pointer),
            *target,
            Pointer,
            *sizes,
            *(Int, Int, Int, Float, Int),
        ),
        pack_bf16=function("llorch_pack_bf16", Pointer, Pointer, Long, Long, Int),
        bf16_linear=function("llorch_bf16_linear", Pointer, Pointer, *target, *sizes, Int),
    )
