"""Linear layers on a card: quantised matrices stay quantised, others use the compute dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from llorch_worker.kernels.quantised_matrix import QuantisedMatrix
from llorch_worker.model_files.model_file import Bytes
from llorch_worker.weights.checkpoint import Checkpoint
from llorch_worker.weights.fused_weight import FusedWeight, Part
from llorch_worker.weights.groups import GroupForm, Groups
from llorch_worker.weights.linear import DenseLinear, DenseProduct, Linear

Multiply = Callable[[torch.Tensor, QuantisedMatrix, torch.Tensor, int], None]
"""``kernels.quantised_matrix.quantised_linear``, or its counterpart for a device."""


class QuantisedLinear:
    """A matrix in one piece for each run of parts with the same block type."""

    def __init__(
        self,
        pieces: tuple[QuantisedMatrix | torch.Tensor, ...],
        multiply: Multiply,
        product: DenseProduct = F.linear,
    ) -> None:
        """A piece that is not quantised is a tensor, [rows, in]."""
        self._pieces = pieces
        self._multiply = multiply
        self._product = product
        self._rows = sum(_rows(piece) for piece in pieces)

    @property
    def weight_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        """See ``Linear``."""
        x = x.contiguous()
        dtype = torch.float32 if wide else x.dtype
        out = torch.empty(len(x), self._rows, dtype=dtype, device=x.device)
        row = 0
        for piece in self._pieces:
            if isinstance(piece, QuantisedMatrix):
                self._multiply(x, piece, out, row)
            else:
                out[:, row : row + len(piece)] = self._product(x, piece)
            row += _rows(piece)
        return out


@dataclass(frozen=True)
class QuantisedLinears:
    """Keeps quantised matrices at about their size in the file; see ``Linears``."""

    device: torch.device
    dtype: torch.dtype
    multiply: Multiply
    product: DenseProduct = F.linear
    """For the pieces that are not quantised."""
    name: str = "quantised Triton"
    shared: None = None
    keeps_quantised: bool = True
    embedding_as_stored: bool = False

    def weight_bytes(self, checkpoint: Checkpoint, weight: FusedWeight) -> int:
        total = 0
        for form, piece in weight.pieces(checkpoint):
            rows, columns = piece.shape
            if form is None:
                total += rows * columns * self.dtype.itemsize
            else:
                total += QuantisedMatrix.bytes_of(
                    rows,
                    columns,
                    bits=_stored_bits(form),
                    group=form.group * form.shared,
                    has_offsets=form.has_offsets,
                )
        return total

    def load(self, checkpoint: Checkpoint, weight: FusedWeight) -> Linear:
        pieces = tuple(
            piece.load(checkpoint, self.dtype).to(self.device)
            if form is None
            # One tensor at a time, so that no more than one is unpacked in memory.
            else QuantisedMatrix.stack(
                [self._quantised(checkpoint, part, form) for part in piece.parts]
            )
            for form, piece in weight.pieces(checkpoint)
        )
        if len(pieces) == 1 and isinstance(pieces[0], torch.Tensor):
            return DenseLinear(pieces[0], self.product)
        return QuantisedLinear(pieces, self.multiply, self.product)

    def _quantised(self, checkpoint: Checkpoint, part: Part, form: GroupForm) -> QuantisedMatrix:
        groups = _read_groups(checkpoint, part, form)
        if not form.fits_half(groups):
            raise checkpoint.out_of_range(part.name)
        offsets = groups.offsets
        return QuantisedMatrix.pack(
            torch.from_numpy(groups.codes).to(self.device),
            torch.from_numpy(groups.scales[:, :: form.shared]).to(self.device),
            None if offsets is None else torch.from_numpy(offsets).to(self.device),
            bits=_stored_bits(form),
            zero=form.zero,
            factor=form.half_factor,
        )


def _read_groups(checkpoint: Checkpoint, part: Part, form: GroupForm) -> Groups:
    """All rows of the tensor, not dequantised."""
    rows, columns = part.shape
    whole = Groups(
        np.empty((rows, columns), np.uint8),
        np.empty((rows, columns // form.group), np.float32),
        np.empty((rows, columns // form.group), np.float32) if form.has_offsets else None,
    )

    def take(first: int, piece: Bytes, order: npt.NDArray[np.int64] | None) -> None:
        groups = form.unpack(piece if order is None else piece[order])
        to = slice(first, first + len(piece))
        whole.codes[to] = groups.codes
        whole.scales[to] = groups.scales
        if whole.offsets is not None and groups.offsets is not None:
            whole.offsets[to] = groups.offsets

    checkpoint.each_piece(part.name, take, row_multiple=1, order=part.order)
    return whole


def _stored_bits(form: GroupForm) -> int:
    return max(4, form.code_bits)


def _rows(piece: QuantisedMatrix | torch.Tensor) -> int:
    return piece.rows if isinstance(piece, QuantisedMatrix) else len(piece)
