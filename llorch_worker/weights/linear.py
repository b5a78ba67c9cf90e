"""Linear layers as objects, so that a quantised one can take a dense one's place."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """``[tokens, in] -> [tokens, out]``."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """A matrix kept in the compute dtype; ``weight: [out, in]``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x: [tokens, in]`` gives ``[tokens, out]`` in the same dtype."""
        return F.linear(x, self.weight)
