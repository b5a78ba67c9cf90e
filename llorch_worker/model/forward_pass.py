"""The state that all layers of a forward pass share: indices, RoPE angles, prepared attention."""

from __future__ import annotations

from itertools import accumulate

import torch

from llorch_worker.cache import UnifiedCache
from llorch_worker.kernels import PLAIN, AttentionForm, Ops, PagedAttention, PagedSequences
from llorch_worker.model.batch import RaggedBatch


class ForwardPass:
    """One batch going through the model. Index tensors are built once here, not in each layer."""

    def __init__(self, batch: RaggedBatch, cache: UnifiedCache, ops: Ops) -> None:
        self._ops = ops
        self._kv = cache.kv
        self._slots = batch.slots
        self._cos, self._sin = cache.rope.at(batch.positions)
        self._attentions: list[PagedAttention] = []
        total = len(batch.query_lengths)
        decoding = next((i for i, n in enumerate(batch.query_lengths) if n > 1), total)
        if decoding:
            sequences = _sequences(batch, range(decoding), cache.block_size)
            self._attentions.append(ops.paged_decode(sequences))
        if decoding < total:
            sequences = _sequences(batch, range(decoding, total), cache.block_size)
            self._attentions.append(ops.paged_prefill(sequences, cache.masks))

    def attend(self, layer: int, qkv: torch.Tensor, form: AttentionForm = PLAIN) -> torch.Tensor:
        """Attention of the new tokens to their own sequences, including themselves.

        ``qkv``: [tokens, heads + 2 * kv_heads, head_dim], not yet rotated; it is overwritten, and
        the new keys and values go to the cache. Returns [tokens, heads * head_dim].
        """
        kv = self._kv.layers[layer]
        self._ops.rope_and_write(qkv, self._cos, self._sin, self._slots, kv)
        tokens, heads, head_dim = qkv.shape
        out = qkv.new_empty(tokens, (heads - 2 * kv.keys.shape[-2]) * head_dim)
        for attention in self._attentions:
            attention(qkv, kv, out, form)
        return out


def _sequences(batch: RaggedBatch, chosen: range, block_size: int) -> PagedSequences:
    """The batch's sequences with the indices ``chosen``."""
    part = slice(chosen.start, chosen.stop)
    starts = tuple(accumulate(batch.query_lengths[:-1], initial=0))
    return PagedSequences(
        first_rows=starts[part],
        query_lengths=batch.query_lengths[part],
        context_lengths=batch.context_lengths[part],
        block_tables=batch.block_tables[part],
        block_size=block_size,
        device_contexts=batch.device_contexts,
    )
