"""Linear layers of a card: quantised matrices stay quantised, others are in the compute dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby

import torch
import torch.nn.functional as F

from llorch_worker.kernels.quantised_matrix import BLOCK_COLUMNS, QuantisedMatrix
from llorch_worker.weights.checkpoint import Checkpoint, weights_out_of_range
from llorch_worker.weights.fused_weight import FusedWeight, Part
from llorch_worker.weights.groups import GroupForm, fits_half
from llorch_worker.weights.linear import DenseLinear, Linear

Multiply = Callable[[torch.Tensor, QuantisedMatrix, torch.Tensor, int], None]
"""``kernels.quantised_matrix.quantised_linear``, or its like for a device."""


class QuantisedLinear:
    """A matrix in as many pieces as its parts have kinds of block."""

    def __init__(
        self, pieces: tuple[QuantisedMatrix | torch.Tensor, ...], multiply: Multiply
    ) -> None:
        """A piece that is not quantised is a tensor, [rows, in]."""
        self._pieces = pieces
        self._multiply = multiply
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
                out[:, row : row + len(piece)] = F.linear(x, piece)
            row += _rows(piece)
        return out


@dataclass(frozen=True)
class QuantisedLinears:
    """Keeps quantised matrices in the bytes of their codes, nearly; see ``Linears``."""

    device: torch.device
    dtype: torch.dtype
    multiply: Multiply
    name: str = "quantised Triton"
    keeps_rows: bool = False

    def weight_bytes(self, checkpoint: Checkpoint, weight: FusedWeight) -> int:
        """See ``Linears``."""
        total = 0
        for form, parts in _pieces(checkpoint, weight):
            rows, columns = parts.shape
            if form is None:
                total += rows * columns * self.dtype.itemsize
            else:
                total += QuantisedMatrix.bytes_of(
                    rows,
                    columns,
                    bits=_stored_bits(form),
                    group=form.group,
                    has_offsets=form.has_offsets,
                )
        return total

    def quantised_parts(self, checkpoint: Checkpoint, weight: FusedWeight) -> tuple[Part, ...]:
        """See ``Linears``."""
        pieces = (parts.parts for form, parts in _pieces(checkpoint, weight) if form is not None)
        return tuple(chain.from_iterable(pieces))

    def load(self, checkpoint: Checkpoint, weight: FusedWeight) -> Linear:
        """See ``Linears``."""
        pieces = tuple(
            parts.load(checkpoint, self.dtype).to(self.device)
            if form is None
            else self._quantised(checkpoint, parts, form)
            for form, parts in _pieces(checkpoint, weight)
        )
        if len(pieces) == 1 and isinstance(pieces[0], torch.Tensor):
            return DenseLinear(pieces[0])
        return QuantisedLinear(pieces, self.multiply)

    def _quantised(
        self, checkpoint: Checkpoint, weight: FusedWeight, form: GroupForm
    ) -> QuantisedMatrix:
        """A tensor at a time, so that no more than one lies unpacked in memory."""
        return QuantisedMatrix.stack(
            [self._quantised_part(checkpoint, part, form) for part in weight.parts]
        )

    def _quantised_part(
        self, checkpoint: Checkpoint, part: Part, form: GroupForm
    ) -> QuantisedMatrix:
        groups = checkpoint.read_groups(part.name, part.rope_heads)
        if not fits_half(groups, form):
            raise weights_out_of_range(checkpoint.path, part.name)
        offsets = groups.offsets
        return QuantisedMatrix.pack(
            torch.from_numpy(groups.codes).to(self.device),
            torch.from_numpy(groups.scales).to(self.device),
            None if offsets is None else torch.from_numpy(offsets).to(self.device),
            bits=_stored_bits(form),
            zero=form.zero,
            factor=form.half_factor,
        )


def _pieces(
    checkpoint: Checkpoint, weight: FusedWeight
) -> Iterator[tuple[GroupForm | None, FusedWeight]]:
    """Neighbouring parts that are stored alike, with their form."""
    narrow = weight.shape[1] % BLOCK_COLUMNS == 0
    for form, parts in groupby(
        weight.parts, lambda part: checkpoint.group_form(part.name) if narrow else None
    ):
        yield form, FusedWeight(tuple(parts))


def _stored_bits(form: GroupForm) -> int:
    return max(4, form.code_bits)


def _rows(piece: QuantisedMatrix | torch.Tensor) -> int:
    return piece.rows if isinstance(piece, QuantisedMatrix) else len(piece)
