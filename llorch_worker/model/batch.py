"""What one forward pass works on: all new tokens of all sequences in one row, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RaggedBatch:
    """One engine step. Tensors are int64 and lie on the model's device.

    Sequence i owns the next ``query_lengths[i]`` entries of the token row; lengths are plain ints
    because shapes follow from them, and reading them back from a device would wait for it.
    """

    token_ids: torch.Tensor
    """[tokens]"""
    positions: torch.Tensor
    """[tokens], each token's place in its own sequence."""
    query_lengths: tuple[int, ...]
    """New tokens of each sequence, at least one; their sum is ``tokens``."""
    context_lengths: tuple[int, ...]
    """Tokens of each sequence in the KV cache after this step, the new ones included."""
    block_tables: torch.Tensor
    """[sequences, max_blocks], KV blocks of each sequence in order, padded with 0."""
    slots: torch.Tensor
    """[tokens], where each new token's keys and values go: block * block_size + offset."""
    logits_rows: torch.Tensor
    """[rows], the tokens whose logits are wanted, as indices into the token row."""
    device_contexts: torch.Tensor | None = None
    """[sequences] of decodes that are recorded once and replayed: the context lengths then come
    from here, and ``context_lengths`` are the most that they may be."""
