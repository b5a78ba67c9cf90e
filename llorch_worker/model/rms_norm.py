"""Root mean square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch


class RmsNorm:
    """Scales each row to a root mean square of one, then by ``weight: [hidden]``."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x: [tokens, hidden]``; the mean is taken in float32 whatever the dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight
