"""The shape of a process's cache, which determines its layout and size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llorch_worker.cache.rope_tables import Rope
from llorch_worker.engine_options import KvDtype

BLOCK_SIZE_TOKENS = 16
MAX_QUERY_TOKENS = 1024
"""Rows of the causal mask. Attention takes a longer chunk in pieces of this many tokens."""


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Everything about a cache except its number of KV blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    ropes: tuple[Rope, ...]
    """The kinds of rotation that the model's layers use."""
    max_context: int
    dtype: torch.dtype
    """The compute dtype."""
    device: torch.device
    kv_dtype: KvDtype = "auto"
    decode_rows: int = 0
    """Sequences in the largest recorded decode step; 0 if none are recorded."""
    vocab_size: int = 0
    """Width of the logits of recorded decode steps."""
    block_size: int = BLOCK_SIZE_TOKENS
    max_query_tokens: int = MAX_QUERY_TOKENS
    """Rows of the causal mask; 0 if no operation reads it."""

    @property
    def context_blocks(self) -> int:
        """KV blocks of one full context."""
        return -(-self.max_context // self.block_size)
