"""Root mean square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch

from llorch_worker.kernels import Ops


class RmsNorm:
    """Scales each row to a root mean square of one, then by ``weight: [hidden]``."""

    def __init__(self, weight: torch.Tensor, eps: float, ops: Ops) -> None:
        self.weight = weight
        self.eps = eps
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x: [tokens, hidden]``; the mean is taken in float32 whatever the dtype."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def after(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(s), s)`` for ``s = x + residual``; both arguments may be overwritten."""
        if residual is None:
            return self(x), x
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
