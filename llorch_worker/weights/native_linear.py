"""Linear layers of a CPU with AVX-512: quantised matrices stay quantised, others are bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.kernels.arena import Arena
from llorch_worker.kernels.native.tiles import TILE_ROWS, Bf16Tiles, QuantisedTiles
from llorch_worker.weights.checkpoint import Checkpoint, TakeRows, weights_out_of_range
from llorch_worker.weights.fused_weight import FusedWeight, Part
from llorch_worker.weights.groups import GroupForm, fits_half, unpack_groups
from llorch_worker.weights.linear import DenseLinear, Linear
from llorch_worker.weights.model_file import Bytes


class NativeLinear:
    """A matrix in tiles, in as many pieces as it has kinds of block."""

    def __init__(self, pieces: tuple[QuantisedTiles | Bf16Tiles, ...]) -> None:
        self._pieces = pieces
        self._rows = sum(piece.rows for piece in pieces)

    @property
    def weight_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        """See ``Linear``; ``x`` is bfloat16."""
        x = x.contiguous()
        dtype = torch.float32 if wide else torch.bfloat16
        out = torch.empty(len(x), self._rows, dtype=dtype)
        row = 0
        for piece in self._pieces:
            piece.multiply_into(x, out, row)
            row += piece.rows
        return out


_PACKED_AS_THEY_ARE = frozenset({GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0})
"""Block types whose codes lie in the file as they do in tiles: no unpacking, a faster load."""


@dataclass(frozen=True)
class _Piece:
    """Neighbouring parts of a weight that are stored alike; ``form`` None: not quantised."""

    weight: FusedWeight
    form: GroupForm | None


class NativeLinears:
    """Keeps matrices in tiles; see ``Linears``."""

    name = "native AVX-512"
    keeps_rows = False

    def __init__(self) -> None:
        self._arena = Arena()

    def weight_bytes(self, checkpoint: Checkpoint, weight: FusedWeight) -> int:
        """See ``Linears``."""
        rows, columns = weight.shape
        if columns % 2:
            return rows * columns * torch.bfloat16.itemsize
        return sum(_piece_bytes(piece) for piece in _pieces(checkpoint, weight))

    def quantised_parts(self, checkpoint: Checkpoint, weight: FusedWeight) -> tuple[Part, ...]:
        """See ``Linears``."""
        if weight.shape[1] % 2:
            return ()
        pieces = (piece for piece in _pieces(checkpoint, weight) if piece.form is not None)
        return tuple(chain.from_iterable(piece.weight.parts for piece in pieces))

    def load(self, checkpoint: Checkpoint, weight: FusedWeight) -> Linear:
        """See ``Linears``."""
        if weight.shape[1] % 2:  # no shape that anybody trains
            return DenseLinear(weight.load(checkpoint, torch.bfloat16))
        pieces = _pieces(checkpoint, weight)
        return NativeLinear(tuple(_tiles(self._arena, checkpoint, piece) for piece in pieces))


def _pieces(checkpoint: Checkpoint, weight: FusedWeight) -> Iterator[_Piece]:
    """As few pieces as the kinds of block allow; each begins a tile, hence a piece, of its own."""
    together: list[Part] = []
    form = None
    rows = 0
    for part in weight.parts:
        part_form = checkpoint.group_form(part.name)
        if together and (part_form != form or rows % TILE_ROWS):
            yield _Piece(FusedWeight(tuple(together)), form)
            together, rows = [], 0
        together.append(part)
        form = part_form
        rows += part.shape[0]
    yield _Piece(FusedWeight(tuple(together)), form)


def _piece_bytes(piece: _Piece) -> int:
    form = piece.form
    if form is None:
        return Bf16Tiles.bytes_of(*piece.weight.shape)
    return QuantisedTiles.bytes_of(
        *piece.weight.shape, bits=form.bits, group=form.group, has_offsets=form.has_offsets
    )


def _tiles(arena: Arena, checkpoint: Checkpoint, piece: _Piece) -> QuantisedTiles | Bf16Tiles:
    if piece.form is not None:
        return _quantised_tiles(arena, checkpoint, piece.weight, piece.form)
    rows, columns = piece.weight.shape
    matrix = Bf16Tiles.empty(arena, rows, columns)
    piece.weight.read_into(checkpoint, matrix[:rows])
    return Bf16Tiles.pack_in_place(matrix, rows)


def _quantised_tiles(
    arena: Arena, checkpoint: Checkpoint, weight: FusedWeight, form: GroupForm
) -> QuantisedTiles:
    tiles = QuantisedTiles.empty(
        arena,
        *weight.shape,
        bits=form.bits,
        group=form.group,
        zero=form.zero,
        has_offsets=form.has_offsets,
        factor=form.half_factor,
    )
    row = 0
    for part in weight.parts:
        type_ = GGMLQuantizationType[checkpoint.tensors[part.name].dtype_name]
        checkpoint.each_piece(
            part.name,
            _packer(tiles, row, type_, form, weights_out_of_range(checkpoint.path, part.name)),
            row_multiple=TILE_ROWS,
            rope_heads=part.rope_heads,
        )
        row += part.shape[0]
    return tiles


def _packer(
    tiles: QuantisedTiles,
    first_row: int,
    type_: GGMLQuantizationType,
    form: GroupForm,
    out_of_range: ModelLoadFailed,
) -> TakeRows:
    """What takes the raw rows of a tensor to ``tiles`` from ``first_row`` on."""

    def pack_blocks(first: int, rows: Bytes, order: npt.NDArray[np.int64] | None) -> None:
        if not tiles.pack_blocks(first_row + first, rows, order):
            raise out_of_range

    def pack_groups(first: int, rows: Bytes, order: npt.NDArray[np.int64] | None) -> None:
        groups = unpack_groups(rows if order is None else rows[order], type_)
        if not fits_half(groups, form):
            raise out_of_range
        tiles.pack(first_row + first, groups.codes, groups.scales, groups.offsets)

    return pack_blocks if type_ in _PACKED_AS_THEY_ARE else pack_groups
