"""Attention with torch's scaled_dot_product_attention on copies of the KV blocks.

Sequences with one new token (decode) share one call, padded to the longest context. Sequences with
more (prefill, or a chunk of it) get a call each.

Grouped heads need no copies. In decode, the query heads of one KV head take the place of queries,
because they see the same keys. In prefill, KV heads are expanded with stride 0. torch's own
``enable_gqa`` copies on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llorch_worker.kernels.interface import CausalMask, PagedSequences
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.upload import on_device


class GatheredDecode:
    """One new token of each sequence; see ``PagedAttention``."""

    def __init__(self, sequences: PagedSequences) -> None:
        tables, size = sequences.block_tables, sequences.block_size
        contexts = sequences.context_lengths
        self._count, self._longest = len(contexts), max(contexts)
        self._rows = on_device(sequences.first_rows, torch.int64, tables.device)
        known = sequences.device_contexts
        lengths = on_device(contexts, torch.int64, tables.device) if known is None else known
        lengths = lengths[:, None]
        places = torch.arange(self._longest, device=tables.device)
        # Padding repeats the sequence's own last token: masked values are still multiplied, and a
        # NaN from another sequence's block would pass through the mask.
        own = torch.minimum(places, lengths - 1)
        self._slots = (tables.gather(1, own // size) * size + own % size).view(-1)
        self._visible = None
        if known is not None or min(contexts) < self._longest:
            self._visible = (places < lengths)[:, None, None, :]  # [sequences, 1, 1, longest]

    def __call__(self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor) -> None:
        kv_heads, head_dim = kv.keys.shape[-2:]
        q = qkv[:, : qkv.shape[1] - 2 * kv_heads].index_select(0, self._rows)
        keys, values = kv.gather(self._slots, qkv.dtype)
        shape = (self._count, self._longest, kv_heads, head_dim)
        attended = F.scaled_dot_product_attention(
            q.view(self._count, kv_heads, -1, head_dim),  # [sequences, kv_heads, group, d]
            keys.view(shape).transpose(1, 2),  # [.., kv_heads, longest, d]
            values.view(shape).transpose(1, 2),
            attn_mask=self._visible,
        )
        out.index_copy_(0, self._rows, attended.reshape(self._count, -1))


@dataclass(frozen=True)
class _Chunk:
    rows: slice
    context_len: int
    slots: torch.Tensor | None
    """[context_len] in the cache; None for a first chunk, whose keys are all in ``qkv``."""


class GatheredPrefill:
    """Any number of new tokens of each sequence; see ``PagedAttention``."""

    def __init__(self, sequences: PagedSequences, mask: CausalMask) -> None:
        self._mask = mask
        offsets = torch.arange(sequences.block_size, device=sequences.block_tables.device)
        self._chunks: list[_Chunk] = []
        for first, query_len, context_len, table in zip(
            sequences.first_rows,
            sequences.query_lengths,
            sequences.context_lengths,
            sequences.block_tables,
            strict=True,
        ):
            slots = None
            if query_len < context_len:
                blocks = table[: -(-context_len // sequences.block_size)]
                slots = (blocks[:, None] * sequences.block_size + offsets).view(-1)[:context_len]
            self._chunks.append(_Chunk(slice(first, first + query_len), context_len, slots))

    def __call__(self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor) -> None:
        kv_heads = kv.keys.shape[-2]
        heads = qkv.shape[1] - 2 * kv_heads
        for chunk in self._chunks:
            q, k, v = torch.split(qkv[chunk.rows], [heads, kv_heads, kv_heads], dim=1)
            if chunk.slots is not None:
                k, v = kv.gather(chunk.slots, qkv.dtype)
            out[chunk.rows] = self._attend(q, k, v)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of the last [query_len] tokens of a context.

        ``q``: [query_len, heads, head_dim]; ``k``, ``v``: [context_len, kv_heads, head_dim].
        Returns [query_len, heads * head_dim].
        """
        query_len, context_len = len(q), len(k)
        if query_len == context_len:
            return _causal(q, k, v, None)
        highest = self._mask.max_query
        if query_len <= highest:
            return _causal(q, k, v, self._mask.view(query_len, context_len))
        # More queries than the mask has rows: a prefix of them sees a prefix of the context.
        head, end = query_len - highest, context_len - highest
        return torch.cat(
            (
                self._attend(q[:head], k[:end], v[:end]),
                _causal(q[head:], k, v, self._mask.view(highest, context_len)),
            )
        )


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One sequence's [query_len, heads * head_dim]; without ``mask``, k is as long as q."""
    query_len, _, head_dim = q.shape
    context_len, kv_heads, _ = k.shape
    # [kv_heads, group, q, d]
    grouped = q.view(query_len, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    shape = (kv_heads, grouped.shape[1], context_len, head_dim)
    out = F.scaled_dot_product_attention(
        grouped,
        k.transpose(0, 1)[:, None].expand(shape),
        v.transpose(0, 1)[:, None].expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(query_len, -1)
