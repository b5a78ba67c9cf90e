"""One transformer block: attention and a gated MLP, each with its norms and around a residual."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llorch_worker.kernels import PLAIN, AttentionForm, Ops
from llorch_worker.model.forward_pass import Attends
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

    def __init__(
        self,
        layer: int,
        qkv: Linear,
        output: Linear,
        *,
        head_dim: int,
        rope: int = 0,
        form: AttentionForm = PLAIN,
        bias: torch.Tensor | None = None,
        norms: QkNorms | None = None,
    ) -> None:
        """``qkv``: one fused matrix, whose rows are Q's heads, then K's, then V's, as ``bias``.

        ``rope``: the layer's kind of rotation.
        """
        self.layer = layer
        self.qkv = qkv
        self.output = output
        self.head_dim = head_dim
        self.rope = rope
        self.form = form
        self.bias = bias
        self.norms = norms

    def __call__(self, x: torch.Tensor, step: Attends) -> torch.Tensor:
        """``x: [tokens, hidden]`` to the same shape; new keys and values go to the cache."""
        qkv = self.qkv(x)
        if self.bias is not None:
            qkv += self.bias
        heads = qkv.view(len(x), -1, self.head_dim)
        if self.norms is not None:
            self.norms(heads)
        return self.output(step.attend(self.layer, heads, self.form, self.rope))


class QkNorms:
    """RMS norms of Q and of K, over each head or over all heads together."""

    def __init__(self, q: RmsNorm, k: RmsNorm, heads: int, kv_heads: int) -> None:
        self.q = q
        self.k = k
        self._heads = heads
        self._kv_heads = kv_heads

    def __call__(self, heads: torch.Tensor) -> None:
        """``heads``: [tokens, heads + 2 * kv_heads, head_dim]; Q and K are normalised in place."""
        first = 0
        for norm, count in ((self.q, self._heads), (self.k, self._kv_heads)):
            part = heads[:, first : first + count]
            rows = part.reshape(-1, len(norm.weight)).contiguous()
            part.copy_(norm(rows).view_as(part))
            first += count


class GatedMlp:
    """``down(act(gate(x)) * up(x))`` (arXiv 2002.05202), gate and up in one matrix."""

    def __init__(
        self, gate_up: Linear, down: Linear, act_and_mul: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """``gate_up``: hidden to 2 * intermediate, gate rows first; ``down``: back to hidden.

        ``act_and_mul``: [tokens, 2 * intermediate] to [tokens, intermediate].
        """
        self.gate_up = gate_up
        self.down = down
        self._act_and_mul = act_and_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x: [tokens, hidden]`` to the same shape."""
        return self.down(self._act_and_mul(self.gate_up(x)))


class Branch:
    """The norms of attention or MLP, and what its output is multiplied by before the addition."""

    def __init__(self, before: RmsNorm | None, after: RmsNorm | None, scale: float = 1.0) -> None:
        self.before = before
        self.after = after
        self.scale = scale

    def enter(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The branch's input and ``x + residual``; both arguments may be overwritten."""
        if self.before is not None:
            return self.before.after(x, residual)
        total = x if residual is None else residual.add_(x)
        return total, total

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the residual."""
        if self.after is not None:
            x = self.after(x)
        return x if self.scale == 1.0 else x.mul_(self.scale)


class Block:
    """``x + attention(x)``, then ``x + mlp(x)``, each branch with its norms.

    The next block's norm, or the final one, does the last addition in the same pass.
    """

    def __init__(
        self, around_attention: Branch, attention: Attention, around_mlp: Branch, mlp: GatedMlp
    ) -> None:
        self.around_attention = around_attention
        self.attention = attention
        self.around_mlp = around_mlp
        self.mlp = mlp

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Attends
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take and return hidden states as two addends, ``x`` and ``residual``: [tokens, hidden].

        The first block has no ``residual``. Both arguments may be overwritten.
        """
        x, residual = self.around_attention.enter(x, residual)
        x = self.around_attention.leave(self.attention(x, step))
        x, residual = self.around_mlp.enter(x, residual)
        return self.around_mlp.leave(self.mlp(x)), residual
