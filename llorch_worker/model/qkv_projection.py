"""Hidden states to queries, keys and values, rotated to their positions."""

from __future__ import annotations

import torch

from llorch_worker.model.rope import apply_rope
from llorch_worker.weights import Linear


class QkvProjection:
    """One matrix for all three; rows are Q's heads, then K's, then V's."""

    def __init__(self, linear: Linear, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.linear = linear
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q: [tokens, heads, head_dim] and k, v: [tokens, kv_heads, head_dim]; q and k are rotated.

        ``x``: [tokens, hidden]; ``cos``, ``sin``: [tokens, 1, head_dim / 2].
        """
        heads = self.linear(x).view(len(x), -1, self.head_dim)
        rotating = self.num_heads + self.num_kv_heads
        # Q's and K's heads lie side by side, so one call rotates both.
        rotated = apply_rope(heads[:, :rotating], cos, sin)
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, rotating:]
