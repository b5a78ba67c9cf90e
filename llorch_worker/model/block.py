"""One transformer block: attention and SwiGLU, each behind a norm and around a residual."""

from __future__ import annotations

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.model.attention import Attention, AttentionStep
from llorch_worker.model.rms_norm import RmsNorm
from llorch_worker.model.swiglu import SwiGlu


class Block:
    """``x + attention(norm(x))``, then ``x + swiglu(norm(x))``."""

    def __init__(
        self, attention_norm: RmsNorm, attention: Attention, mlp_norm: RmsNorm, mlp: SwiGlu
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: UnifiedCache,
        step: AttentionStep,
    ) -> torch.Tensor:
        """``x: [tokens, hidden]`` gives the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin, slots, cache, step)
        return x + self.mlp(self.mlp_norm(x))
