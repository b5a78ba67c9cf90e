"""Self-attention: projections around an exchangeable backend that works on the paged cache."""

from __future__ import annotations

from typing import Protocol

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.model.batch import RaggedBatch
from llorch_worker.model.qkv_projection import QkvProjection
from llorch_worker.weights import Linear


class AttentionStep(Protocol):
    """A backend's preparations for one forward pass, shared by all its layers."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of the new tokens to their own sequences.

        ``q``: [tokens, heads, head_dim]; ``k``, ``v``: [tokens, kv_heads, head_dim], already
        written to the cache. Returns [tokens, heads * head_dim].
        """


class AttentionBackend(Protocol):
    """Makes an AttentionStep: index tensors are built once a forward pass, not once a layer."""

    def prepare(self, batch: RaggedBatch, cache: UnifiedCache) -> AttentionStep: ...


class Attention:
    """``hidden -> q, k, v -> cache -> attention -> hidden`` of one layer."""

    def __init__(self, layer: int, qkv: QkvProjection, output: Linear) -> None:
        self.layer = layer
        self.qkv = qkv
        self.output = output

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: UnifiedCache,
        step: AttentionStep,
    ) -> torch.Tensor:
        """``x: [tokens, hidden]`` gives the same shape; new keys and values go to ``slots``."""
        q, k, v = self.qkv(x, cos, sin)
        cache.kv.write(self.layer, slots, k, v)
        return self.output(step.attend(self.layer, q, k, v))
