"""One transformer block: attention and SwiGLU, each behind an RMS norm and around a residual."""

from __future__ import annotations

import torch

from llorch_worker.kernels import Ops
from llorch_worker.model.forward_pass import ForwardPass
from llorch_worker.weights import Linear


class RmsNorm:
    """Root mean square normalisation (arXiv 1910.07467) by ``weight: [hidden]``."""

    def __init__(self, weight: torch.Tensor, eps: float, ops: Ops) -> None:
        self.weight = weight
        self.eps = eps
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x: [tokens, hidden]``; the mean is computed in float32 for every dtype."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def after(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(s), s)`` for ``s = x + residual``; both arguments may be overwritten."""
        if residual is None:
            return self(x), x
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)


class Attention:
    """Self-attention of one layer: the QKV and output matrices around the forward pass's part."""

    def __init__(self, layer: int, qkv: Linear, output: Linear, *, head_dim: int) -> None:
        """``qkv``: one fused matrix, whose rows are Q's heads, then K's, then V's."""
        self.layer = layer
        self.qkv = qkv
        self.output = output
        self.head_dim = head_dim

    def __call__(self, x: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """``x: [tokens, hidden]`` to the same shape; new keys and values go to the cache."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        return self.output(step.attend(self.layer, heads))


class SwiGlu:
    """SwiGLU (arXiv 2002.05202): ``down(silu(gate(x)) * up(x))``, gate and up in one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, ops: Ops) -> None:
        """``gate_up``: hidden to 2 * intermediate, gate rows first; ``down``: back to hidden."""
        self.gate_up = gate_up
        self.down = down
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x: [tokens, hidden]`` to the same shape."""
        return self.down(self._ops.silu_and_mul(self.gate_up(x)))


class Block:
    """``x + attention(norm(x))``, then ``x + swiglu(norm(x))``.

    The next block's norm, or the final one, does the last addition in the same pass.
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
        """Take and return hidden states as two addends, ``x`` and ``residual``: [tokens, hidden].

        The first block has no ``residual``. Both arguments may be overwritten.
        """
        x, residual = self.attention_norm.after(x, residual)
        x, residual = self.mlp_norm.after(self.attention(x, step), residual)
        return self.mlp(x), residual
