"""Linear layers of the native kernels: quantised matrices stay so, others are bfloat16."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from llorch_worker.kernels.arena import Arena
from llorch_worker.kernels.fixed_linear import fixed_linear
from llorch_worker.kernels.native.library import NativeKernels
from llorch_worker.kernels.native.tiles import TILE_ROWS, Bf16Tiles, QuantisedTiles
from llorch_worker.model_files.model_file import Bytes
from llorch_worker.weights.checkpoint import Checkpoint, TakeRows
from llorch_worker.weights.fused_weight import FusedWeight
from llorch_worker.weights.groups import GroupForm
from llorch_worker.weights.linear import DenseLinear, Linear


class NativeLinear:
    """A matrix in tiles, one piece for each run of parts with the same block type."""

    def __init__(self, pieces: tuple[QuantisedTiles | Bf16Tiles, ...]) -> None:
        self.pieces = pieces
        self.rows = sum(piece.rows for piece in pieces)

    @property
    def weight_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        """See ``Linear``; ``x`` is bfloat16."""
        x = x.contiguous()
        dtype = torch.float32 if wide else torch.bfloat16
        out = torch.empty(len(x), self.rows, dtype=dtype)
        row = 0
        for piece in self.pieces:
            piece.multiply_into(x, out, row)
            row += piece.rows
        return out


class NativeLinears:
    """Keeps matrices in tiles; see ``Linears``."""

    shared = None
    keeps_quantised = True
    embedding_as_stored = True

    def __init__(self, kernels: NativeKernels) -> None:
        self.name = f"native {kernels.variant}"
        self._kernels = kernels
        self._arena = Arena()

    def weight_bytes(self, checkpoint: Checkpoint, weight: FusedWeight) -> int:
        if weight.shape[1] % 2:
            return weight.elements * torch.bfloat16.itemsize
        return sum(_piece_bytes(*piece) for piece in weight.pieces(checkpoint, TILE_ROWS))

    def load(self, checkpoint: Checkpoint, weight: FusedWeight) -> Linear:
        if weight.shape[1] % 2:  # tiles hold pairs of columns; no trained model has an odd number
            return DenseLinear(weight.load(checkpoint, torch.bfloat16), fixed_linear)
        return NativeLinear(
            tuple(
                self._bf16_tiles(checkpoint, piece)
                if form is None
                else self._quantised_tiles(checkpoint, piece, form)
                for form, piece in weight.pieces(checkpoint, TILE_ROWS)
            )
        )

    def _bf16_tiles(self, checkpoint: Checkpoint, weight: FusedWeight) -> Bf16Tiles:
        rows, columns = weight.shape
        matrix = Bf16Tiles.empty(self._arena, rows, columns)
        weight.read_into(checkpoint, matrix[:rows])
        return Bf16Tiles.pack_in_place(self._kernels, matrix, rows)

    def _quantised_tiles(
        self, checkpoint: Checkpoint, weight: FusedWeight, form: GroupForm
    ) -> QuantisedTiles:
        tiles = QuantisedTiles.empty(self._kernels, self._arena, form.tiles, *weight.shape)
        row = 0
        for part in weight.parts:
            checkpoint.each_piece(
                part.name,
                _packer(tiles, row, form, checkpoint, part.name),
                row_multiple=TILE_ROWS,
                order=part.order,
            )
            row += part.shape[0]
        return tiles


def _piece_bytes(form: GroupForm | None, weight: FusedWeight) -> int:
    if form is None:
        return Bf16Tiles.bytes_of(*weight.shape)
    return QuantisedTiles.bytes_of(form.tiles, *weight.shape)


def _packer(
    tiles: QuantisedTiles, first_row: int, form: GroupForm, checkpoint: Checkpoint, name: str
) -> TakeRows:
    """A function that packs raw rows of the tensor into ``tiles`` from ``first_row`` on."""

    def pack_blocks(first: int, rows: Bytes, order: npt.NDArray[np.int64] | None) -> None:
        if not tiles.pack_blocks(first_row + first, rows, order):
            raise checkpoint.out_of_range(name)

    def pack_groups(first: int, rows: Bytes, order: npt.NDArray[np.int64] | None) -> None:
        rows = rows if order is None else rows[order]
        if not form.finite(rows):
            raise checkpoint.out_of_range(name)
        groups = form.unpack(rows)
        tables = form.unpack_block_scales(rows)
        if tables is None:
            scales = np.ascontiguousarray(groups.scales[:, :: form.shared])
            tiles.pack(first_row + first, groups.codes, scales, groups.offsets, None)
        else:
            tiles.pack(
                first_row + first, groups.codes, tables.scales, tables.offsets, tables.level_bytes
            )

    # These two store codes in the order of tiles: no unpacking, a faster load.
    tile_order = form.type in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0)
    return pack_blocks if tile_order else pack_groups
