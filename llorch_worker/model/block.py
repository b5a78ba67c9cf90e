"""One transformer block: attention and SwiGLU, each behind a norm and around a residual."""

from __future__ import annotations

import torch

from llorch_worker.model.attention import Attention
from llorch_worker.model.forward_pass import ForwardPass
from llorch_worker.model.rms_norm import RmsNorm
from llorch_worker.model.swiglu import SwiGlu


class Block:
    """``x + attention(norm(x))``, then ``x + swiglu(norm(x))``.

    The last addition is left to whoever comes next, whose norm does it in passing.
    """

    def __init__(
        self, attention_norm: RmsNorm, attention: Attention, mlp_norm: RmsNorm, mlp: SwiGlu
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: ForwardPass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states are ``x + residual``, both [tokens, hidden]; so are the results'.

        The first block has no ``residual`` yet. Both arguments may be overwritten.
        """
        x, residual = self.attention_norm.after(x, residual)
        x, residual = self.mlp_norm.after(self.attention(x, step), residual)
        return self.mlp(x), residual
