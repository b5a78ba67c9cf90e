"""Linear layers as objects, so that a quantised one can take a dense one's place."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """``[tokens, in] -> [tokens, out]``, and where ``wide`` is asked for in float32.

    Logits are asked for wide: the steps of bfloat16 are an eighth at 16, and would make ties.
    """

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor: ...


class DenseLinear:
    """A matrix kept in the compute dtype; ``weight: [out, in]``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        """``x: [tokens, in]`` gives ``[tokens, out]``; torch rounds it to ``x``'s dtype first."""
        out = F.linear(x, self.weight)
        return out.float() if wide else out
