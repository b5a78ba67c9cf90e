"""One weight of the model and the tensors of a checkpoint that it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llorch_worker.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Part:
    """Some rows of a weight: one tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    rope_heads: int | None = None


@dataclass(frozen=True)
class FusedWeight:
    """One weight of the model: its parts, stacked by rows in this order."""

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
        """Fill ``out``, of the weight's shape, part by part: no second copy at any time."""
        row = 0
        for part in self.parts:
            rows = out[row : row + part.shape[0]]
            checkpoint.read_into(part.name, rows, part.rope_heads)
            row += part.shape[0]
