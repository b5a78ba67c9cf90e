"""The shape of a process's cache, which determines its layout and size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from llorch_worker.cache.rope_tables import Rope
from llorch_worker.engine_options import KvDtype

BLOCK_SIZE_TOKENS = 16
MAX_QUERY_TOKENS = 1024
"""Rows of the causal mask. Attention takes a longer chunk in pieces of this many tokens."""


_WINDOWS_KEPT = 2
"""Windowed layers have blocks for the windows of all running sequences, and as many again for what
later prompts may find."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the keys and values of the same tokens."""

    window: int | None
    """A query sees so many tokens, itself included, and no others are kept; None: all are."""
    layers: tuple[int, ...]


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
    windows: tuple[int | None, ...] = ()
    """For each layer its window, see ``LayerGroup``; empty: all layers keep all tokens."""
    max_sequences: int = 0
    """Sequences that run at once; 0 if unknown: windows then save no memory."""
    max_step_tokens: int = 0
    """Tokens that a step computes."""

    @property
    def context_blocks(self) -> int:
        """KV blocks of one full context."""
        return -(-self.max_context // self.block_size)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers that keep all tokens, perhaps none, then those of each shorter window."""
        longest = self.max_context - 2 * self.block_size
        windows = [w if w is not None and w < longest else None for w in self.windows]
        windows = windows or [None] * self.num_layers
        kinds = [None, *sorted({window for window in windows if window is not None})]
        return tuple(
            LayerGroup(kind, tuple(i for i, window in enumerate(windows) if window == kind))
            for kind in kinds
        )

    def block_counts(self, num_blocks: int) -> tuple[int, ...]:
        """Blocks of each group if sequences have ``num_blocks`` for all their tokens.

        A group never runs out of blocks: each block of a sequence needs at most one in the group,
        and a sequence needs no more than its window and the tokens of a step touch.
        """
        counts = []
        for group in self.groups:
            count = num_blocks
            if group.window is not None and self.max_sequences:
                touched = -(-group.window // self.block_size) + 2
                step = -(-self.max_step_tokens // self.block_size)
                count = min(count, _WINDOWS_KEPT * (self.max_sequences * touched + step))
            counts.append(count)
        return tuple(counts)
