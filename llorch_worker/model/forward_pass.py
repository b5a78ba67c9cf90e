"""The state that all layers of a forward pass share: indices, RoPE angles, prepared attention."""

from __future__ import annotations

from itertools import accumulate

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.kernels import Ops, PagedAttention, PagedSequences
from llorch_worker.model.batch import RaggedBatch


class ForwardPass:
    """One batch going through the model. Index tensors are built once here, not in each layer."""

    def __init__(self, batch: RaggedBatch, cache: UnifiedCache, ops: Ops) -> None:
        self._ops = ops
        self._kv = cache.kv
        self._slots = batch.slots
        self._cos, self._sin = cache.rope.at(batch.positions)
        self._attentions: list[PagedAttention] = []
        decoding = [i for i, length in enumerate(batch.query_lengths) if length == 1]
        prefilling = [i for i, length in enumerate(batch.query_lengths) if length > 1]
        if decoding:
            sequences = _sequences(batch, decoding, cache.block_size)
            self._attentions.append(ops.paged_decode(sequences))
        if prefilling:
            sequences = _sequences(batch, prefilling, cache.block_size)
            self._attentions.append(ops.paged_prefill(sequences, cache.masks))

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention of the new tokens to their own sequences, including themselves.

        ``qkv``: [tokens, heads + 2 * kv_heads, head_dim], not yet rotated; it is overwritten, and
        the new keys and values go to the cache. Returns [tokens, heads * head_dim].
        """
        kv = self._kv.layers[layer]
        self._ops.rope_and_write(qkv, self._cos, self._sin, self._slots, kv)
        tokens, heads, head_dim = qkv.shape
        out = qkv.new_empty(tokens, (heads - 2 * kv.keys.shape[-2]) * head_dim)
        for attention in self._attentions:
            attention(qkv, kv, out)
        return out


def _sequences(batch: RaggedBatch, chosen: list[int], block_size: int) -> PagedSequences:
    """The batch's sequences with the indices ``chosen``."""
    starts = list(accumulate(batch.query_lengths[:-1], initial=0))
    tables = batch.block_tables
    if len(chosen) < len(starts):
        tables = tables.index_select(0, torch.tensor(chosen, device=tables.device))
    return PagedSequences(
        first_rows=tuple(starts[i] for i in chosen),
        query_lengths=tuple(batch.query_lengths[i] for i in chosen),
        context_lengths=tuple(batch.context_lengths[i] for i in chosen),
        block_tables=tables,
        block_size=block_size,
        device_contexts=batch.device_contexts,
    )
