"""A weight of the model, made of one or more tensors of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llorch_worker.weights.checkpoint import Checkpoint
from llorch_worker.weights.groups import GroupForm
from llorch_worker.weights.rope_order import RopeOrder


@dataclass(frozen=True)
class Part:
    """Some rows of a weight: one tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    order: RopeOrder | None = None
    """How the file orders the rows; None if as the model."""


@dataclass(frozen=True)
class FusedWeight:
    """A weight whose parts are stacked by rows, in this order."""

    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> torch.Tensor:
        """The whole weight, dequantised, in row order."""
        out = torch.empty(self.shape, dtype=dtype)
        self.read_into(checkpoint, out)
        return out

    def read_into(self, checkpoint: Checkpoint, out: torch.Tensor) -> None:
        """Fill ``out``, of the weight's shape, part by part, without a second copy in memory."""
        row = 0
        for part in self.parts:
            rows = out[row : row + part.shape[0]]
            checkpoint.read_into(part.name, rows, part.order)
            row += part.shape[0]

    def quantised_parts(self, checkpoint: Checkpoint) -> tuple[Part, ...]:
        """The parts that the checkpoint stores as scaled integers."""
        return tuple(part for part in self.parts if checkpoint.group_form(part.name) is not None)

    def pieces(
        self, checkpoint: Checkpoint, row_multiple: int = 1
    ) -> Iterator[tuple[GroupForm | None, FusedWeight]]:
        """Neighbouring parts of the same form, as few pieces as possible.

        Within a piece each part begins at a multiple of ``row_multiple`` rows.
        """
        together: list[Part] = []
        form = None
        rows = 0
        for part in self.parts:
            part_form = checkpoint.group_form(part.name)
            if together and (part_form != form or rows % row_multiple):
                yield form, FusedWeight(tuple(together))
                together, rows = [], 0
            together.append(part)
            form = part_form
            rows += part.shape[0]
        yield form, FusedWeight(tuple(together))
