"""The state that all layers of a forward pass share: indices, RoPE angles, prepared attention."""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol, cast

import torch

from llorch_worker.cache import Places, UnifiedCache
from llorch_worker.kernels import PLAIN, AttentionForm, Ops, PagedAttention, PagedSequences
from llorch_worker.kernels.native.layers import NativeLayers
from llorch_worker.kernels.native.paged_attention import NativeAttention
from llorch_worker.model.batch import RaggedBatch


class Attends(Protocol):
    """What blocks need of a forward pass."""

    def attend(
        self, layer: int, qkv: torch.Tensor, form: AttentionForm = PLAIN, rope: int = 0
    ) -> torch.Tensor:
        """See :meth:`.ForwardPass.attend`."""


class ForwardPass:
    """One batch going through the model. Index tensors are built once here, not in each layer."""

    def __init__(
        self,
        batch: RaggedBatch,
        cache: UnifiedCache,
        ops: Ops,
        query_growth: torch.Tensor | None = None,
    ) -> None:
        """``query_growth``: [tokens, 1, 1] in the compute dtype, multiplies Q."""
        self._ops = ops
        self._kv = cache.kv
        self._angles = cache.rope.at(batch.positions)
        self._query_growth = query_growth
        self._places = batch.places
        self._attentions: list[list[PagedAttention]] = [
            _attentions(batch, places, cache, ops) if group.layers else []
            for group, places in zip(cache.shape.groups, self._places, strict=True)
        ]

    def attend(
        self, layer: int, qkv: torch.Tensor, form: AttentionForm = PLAIN, rope: int = 0
    ) -> torch.Tensor:
        """Attention of the new tokens to their own sequences, including themselves.

        ``rope``: the layer's kind of rotation.
        ``qkv``: [tokens, heads + 2 * kv_heads, head_dim], not yet rotated; it is overwritten, and
        the new keys and values go to the cache. Returns [tokens, heads * head_dim].
        """
        tokens, heads, head_dim = qkv.shape
        heads -= 2 * self._kv.layers[layer].keys.shape[-2]
        out = qkv.new_empty(tokens, heads * head_dim)
        self.attend_into(out, layer, qkv, form, rope)
        return out

    def attend_into(
        self, out: torch.Tensor, layer: int, qkv: torch.Tensor, form: AttentionForm, rope: int
    ) -> None:
        """As :meth:`attend`, which writes to ``out``."""
        kv, group = self._kv.layers[layer], self._kv.group_of[layer]
        heads = qkv.shape[1] - 2 * kv.keys.shape[-2]
        if self._query_growth is not None:
            qkv[:, :heads] *= self._query_growth
        self._ops.rope_and_write(qkv, *self._angles[rope], self._places[group].slots, kv)
        for attention in self._attentions[group]:
            attention(qkv, kv, out, form)

    def through(self, layers: NativeLayers, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` after all layers, as two addends; see ``Block``."""
        slots = [places.slots for places in self._places]
        attentions = cast("list[list[NativeAttention]]", self._attentions)
        added = layers(x, self._kv, self._angles, self._query_growth, slots, attentions)
        return added, x


def _attentions(
    batch: RaggedBatch, places: Places, cache: UnifiedCache, ops: Ops
) -> list[PagedAttention]:
    """Of the sequences that decode, and of the others, in one group of layers."""
    total = len(batch.query_lengths)
    decoding = next((i for i, n in enumerate(batch.query_lengths) if n > 1), total)
    attentions = []
    if decoding:
        sequences = _sequences(batch, places, range(decoding), cache.block_size)
        attentions.append(ops.paged_decode(sequences))
    if decoding < total:
        sequences = _sequences(batch, places, range(decoding, total), cache.block_size)
        attentions.append(ops.paged_prefill(sequences, cache.masks))
    return attentions


def _sequences(
    batch: RaggedBatch, places: Places, chosen: range, block_size: int
) -> PagedSequences:
    """The batch's sequences with the indices ``chosen``."""
    part = slice(chosen.start, chosen.stop)
    starts = tuple(accumulate(batch.query_lengths[:-1], initial=0))
    return PagedSequences(
        first_rows=starts[part],
        query_lengths=batch.query_lengths[part],
        context_lengths=batch.context_lengths[part],
        block_tables=places.block_tables[part],
        block_size=block_size,
        device_contexts=batch.device_contexts,
    )
