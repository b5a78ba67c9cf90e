"""Attention through torch's scaled_dot_product_attention, on any device.

Sequences with one new token (decode) share one call, padded to the longest context among them.
A sequence with more (prefill, or a chunk of one) has a call of its own.

Grouped heads cost no copies: in decode the query heads of one KV head stand where queries stand
otherwise (they see the same keys), in prefill the KV heads are expanded with stride 0. (torch's own
``enable_gqa`` copies on the CPU.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llorch_worker.cache import UnifiedCache
from llorch_worker.model.batch import RaggedBatch


@dataclass(frozen=True)
class _DecodeGroup:
    rows: torch.Tensor | None
    """[sequences] in the token row; None when the row holds nothing else."""
    slots: torch.Tensor
    """[sequences * longest], each sequence's context in the cache, padded with its last token."""
    mask: torch.Tensor | None
    """[sequences, 1, 1, longest], 0 or -inf; None when all contexts are equally long."""
    sequences: int
    longest: int


@dataclass(frozen=True)
class _Prefill:
    start: int
    query_len: int
    context_len: int
    slots: torch.Tensor | None
    """[context_len] in the cache; None for a first chunk, whose keys are all at hand."""


class SdpaAttention:
    """The AttentionBackend that every device has."""

    def prepare(self, batch: RaggedBatch, cache: UnifiedCache) -> SdpaStep:
        """Index tensors and masks for one forward pass over ``batch``."""
        starts: list[int] = []
        at = 0
        for length in batch.query_lengths:
            starts.append(at)
            at += length
        decoding = [i for i, length in enumerate(batch.query_lengths) if length == 1]
        prefills = [
            self._prefill(batch, i, starts[i], cache.block_size)
            for i, length in enumerate(batch.query_lengths)
            if length > 1
        ]
        decode = None
        if decoding:
            rows = None if not prefills else [starts[i] for i in decoding]
            decode = self._decode_group(batch, decoding, rows, cache)
        return SdpaStep(cache, decode, prefills)

    @staticmethod
    def _prefill(batch: RaggedBatch, sequence: int, start: int, block_size: int) -> _Prefill:
        query_len = batch.query_lengths[sequence]
        context_len = batch.context_lengths[sequence]
        slots = None
        if query_len < context_len:
            blocks = batch.block_tables[sequence, : -(-context_len // block_size)]
            offsets = torch.arange(block_size, device=blocks.device)
            slots = (blocks[:, None] * block_size + offsets).view(-1)[:context_len]
        return _Prefill(start, query_len, context_len, slots)

    @staticmethod
    def _decode_group(
        batch: RaggedBatch, sequences: list[int], rows: list[int] | None, cache: UnifiedCache
    ) -> _DecodeGroup:
        device = batch.block_tables.device
        contexts = [batch.context_lengths[i] for i in sequences]
        longest = max(contexts)
        tables = batch.block_tables
        if rows is not None:
            tables = tables.index_select(0, torch.tensor(sequences, device=device))
        lengths = torch.tensor(contexts, device=device)[:, None]
        places = torch.arange(longest, device=device)
        # Padding repeats the sequence's own last token: a masked score is still multiplied, and a
        # NaN from a block of somebody else's would come through the mask.
        own = torch.minimum(places, lengths - 1)
        slots = tables.gather(1, own // cache.block_size) * cache.block_size
        slots += own % cache.block_size
        mask = None
        if min(contexts) < longest:
            mask = torch.zeros(len(contexts), longest, dtype=cache.kv.keys.dtype, device=device)
            mask.masked_fill_(places >= lengths, float("-inf"))
            mask = mask[:, None, None, :]
        return _DecodeGroup(
            rows=None if rows is None else torch.tensor(rows, device=device),
            slots=slots.view(-1),
            mask=mask,
            sequences=len(contexts),
            longest=longest,
        )


class SdpaStep:
    """One forward pass's attention; see ``AttentionStep``."""

    def __init__(
        self, cache: UnifiedCache, decode: _DecodeGroup | None, prefills: list[_Prefill]
    ) -> None:
        self._cache = cache
        self._decode = decode
        self._prefills = prefills

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """``q``: [tokens, heads, head_dim], ``k``, ``v``: [tokens, kv_heads, head_dim]."""
        decode = self._decode
        if decode is not None and decode.rows is None:
            return self._attend_decode(layer, q, decode)
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        if decode is not None and decode.rows is not None:
            out[decode.rows] = self._attend_decode(layer, q[decode.rows], decode)
        for prefill in self._prefills:
            rows = slice(prefill.start, prefill.start + prefill.query_len)
            if prefill.slots is None:
                keys, values = k[rows], v[rows]
            else:
                keys, values = self._cache.kv.gather(layer, prefill.slots)
            out[rows] = self._attend_prefill(q[rows], keys, values)
        return out

    def _attend_decode(self, layer: int, q: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
        """``q``: [sequences, heads, head_dim] gives [sequences, heads * head_dim]."""
        keys, values = self._cache.kv.gather(layer, group.slots)
        _, kv_heads, head_dim = keys.shape
        shape = (group.sequences, group.longest, kv_heads, head_dim)
        out = F.scaled_dot_product_attention(
            q.reshape(group.sequences, kv_heads, -1, head_dim),  # [sequences, kv_heads, group, d]
            keys.view(shape).transpose(1, 2),  # [sequences, kv_heads, longest, d]
            values.view(shape).transpose(1, 2),
            attn_mask=group.mask,
        )
        return out.reshape(group.sequences, -1)

    def _attend_prefill(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The last [query_len] tokens of a context see it causally.

        ``q``: [query_len, heads, head_dim]; ``keys``, ``values``: [context_len, kv_heads,
        head_dim]. Returns [query_len, heads * head_dim].
        """
        query_len, context_len = len(q), len(keys)
        max_query = self._cache.masks.max_query
        if query_len == context_len:
            return _causal(q, keys, values, None)
        if query_len <= max_query:
            mask = self._cache.masks.view(query_len, context_len)
            return _causal(q, keys, values, mask)
        # Longer than the mask is high: a prefix of the queries sees a prefix of the context.
        head = query_len - max_query
        end = context_len - max_query
        return torch.cat(
            (
                self._attend_prefill(q[:head], keys[:end], values[:end]),
                _causal(q[head:], keys, values, self._cache.masks.view(max_query, context_len)),
            )
        )


def _causal(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One sequence's [query_len, heads * head_dim]; without ``mask`` keys are as many as q."""
    query_len, heads, head_dim = q.shape
    context_len, kv_heads, _ = keys.shape
    shape = (kv_heads, heads // kv_heads, context_len, head_dim)
    out = F.scaled_dot_product_attention(
        q.view(query_len, kv_heads, -1, head_dim).permute(1, 2, 0, 3),  # [kv_heads, group, q, d]
        keys.transpose(0, 1)[:, None].expand(shape),
        values.transpose(0, 1)[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(query_len, -1)
