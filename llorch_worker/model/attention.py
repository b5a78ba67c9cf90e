"""Self-attention: two matrices around what the forward pass prepared."""

from __future__ import annotations

import torch

from llorch_worker.model.forward_pass import ForwardPass
from llorch_worker.weights import Linear


class Attention:
    """``hidden -> q, k, v -> cache -> attention -> hidden`` of one layer."""

    def __init__(self, layer: int, qkv: Linear, output: Linear, *, head_dim: int) -> None:
        """``qkv``: one matrix for all three; rows are Q's heads, then K's, then V's."""
        self.layer = layer
        self.qkv = qkv
        self.output = output
        self.head_dim = head_dim

    def __call__(self, x: torch.Tensor, step: ForwardPass) -> torch.Tensor:
        """``x: [tokens, hidden]`` gives the same shape; new keys and values go to the cache."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        return self.output(step.attend(self.layer, heads))
