"""Attention with torch's scaled_dot_product_attention on copies of the KV blocks.

Sequences with one new token (decode) share a call, padded to the longest context, as far as
``DECODED_AT_ONCE`` allows. Sequences with more (prefill, or a chunk of it) get a call each.

Grouped heads need no copies. In decode, the query heads of one KV head take the place of queries,
because they see the same keys. In prefill, KV heads are expanded with stride 0. torch's own
``enable_gqa`` copies on the CPU.

Windows and caps of scores need masks and scores of their own: ``PIECE_QUERIES`` at once, so that
they stay small, and so that a long prompt reads little more than its windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llorch_worker.kernels.grouping import in_groups
from llorch_worker.kernels.interface import (
    AttentionForm,
    AttentionRoom,
    CausalMask,
    PagedSequences,
)
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.upload import on_device

PIECE_QUERIES = 256
DECODED_AT_ONCE = {"cpu": 8192, "cuda": 131_072}
"""The most tokens that sequences which share a call have together, padding included. On a CPU what
leaves its caches is slower; on a card each call costs time."""


def gathered_attention_bytes(room: AttentionRoom) -> int:
    """The most memory that the classes here take."""
    item, wide = room.dtype.itemsize, torch.float32.itemsize
    context, tokens = room.max_context, room.max_step_tokens
    # Slots, and which of them are padding.
    kept = len(room.windows) * room.max_sequences * context * 9
    # Of a number of a key and of its value: an int8 one is in float32 twice on its way.
    pair = max(2 * item, item + 2 * wide) if room.kv_dtype == "int8" else 2 * item
    results = 2 * min(room.max_sequences, tokens) * room.heads * room.head_dim * item
    at_once = min(room.max_sequences * context, max(context, _decoded_at_once(room.device_type)))
    # Without a cap, torch makes the mask of numbers.
    scores, decode_pair = item, pair
    if room.softcap:
        scores, decode_pair = 3 * room.heads * wide, max(pair, 3 * wide)
    cell = room.kv_heads * room.head_dim
    decode = at_once * (cell * decode_pair + scores) + results
    rows = min(tokens, PIECE_QUERIES if room.softcap else max(PIECE_QUERIES, room.mask_rows))
    seen = context * rows * item
    if room.softcap:
        # Keys of each head in float32 and transposed, beside the scores; or those three times.
        keys = 2 * room.heads * room.head_dim * wide
        seen = context * (max(keys, 2 * rows * room.heads * wide) + rows * (room.heads * wide + 2))
    in_pieces = room.softcap or any(room.windows) or tokens > room.mask_rows
    results = (1 + in_pieces) * tokens * room.heads * room.head_dim * item
    return kept + max(decode, context * cell * pair + seen + results)


def _decoded_at_once(device_type: str) -> int:
    return DECODED_AT_ONCE["cpu" if device_type == "cpu" else "cuda"]


@dataclass(frozen=True)
class _Reading:
    """What decode reads of some sequences with one window."""

    rows: torch.Tensor
    """Their tokens: [sequences] int64."""
    count: int
    """Tokens of each sequence, the last ones; padded."""
    slots: torch.Tensor
    """[sequences * count] int64 in the cache."""
    visible: torch.Tensor | None
    """[sequences, 1, 1, count] bool; None if nothing is padding."""


class GatheredDecode:
    """One new token of each sequence; see ``PagedAttention``."""

    def __init__(self, sequences: PagedSequences) -> None:
        contexts, device = sequences.context_lengths, sequences.block_tables.device
        self._sequences, self._longest = sequences, max(contexts)
        self._rows = on_device(sequences.first_rows, torch.int64, device)
        known = sequences.device_contexts
        lengths = on_device(contexts, torch.int64, device) if known is None else known
        self._lengths = lengths[:, None]
        self._readings: dict[int | None, list[_Reading]] = {}

    def __call__(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        window = form.window_in(self._longest)
        readings = self._readings.get(window)
        if readings is None:
            most = _decoded_at_once(self._rows.device.type)
            contexts = self._sequences.context_lengths
            members = in_groups(
                contexts, lambda count, longest: count * (window or longest) <= most
            )
            readings = self._readings[window] = [self._read(window, each) for each in members]
        for reading in readings:
            _decode(reading, qkv, kv, out, form)

    def _read(self, window: int | None, members: slice) -> _Reading:
        contexts, lengths = self._sequences.context_lengths[members], self._lengths[members]
        tables, size = self._sequences.block_tables[members], self._sequences.block_size
        places = torch.arange(window or max(contexts), device=tables.device)
        if window is not None:
            places = (lengths - window).clamp_(min=0) + places
        # Padding repeats the sequence's own last token: masked values are still multiplied, and a
        # NaN from another sequence's block would pass through the mask.
        own = torch.minimum(places, lengths - 1)
        slots = torch.add(own % size, tables.gather(1, own // size), alpha=size).view(-1)
        count, shortest = places.shape[-1], min(contexts)
        visible = None
        if self._sequences.device_contexts is not None or shortest < count:
            visible = (places < lengths)[:, None, None, :]
        return _Reading(self._rows[members], count, slots, visible)


def _decode(
    reading: _Reading, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
) -> None:
    kv_heads, head_dim = kv.keys.shape[-2:]
    q = qkv[:, : qkv.shape[1] - 2 * kv_heads].index_select(0, reading.rows)
    keys, values = kv.gather(reading.slots, qkv.dtype)
    shape = (len(q), reading.count, kv_heads, head_dim)
    attended = _attend(
        q.view(len(q), kv_heads, -1, head_dim),  # [sequences, kv_heads, group, d]
        keys.view(shape).transpose(1, 2),  # [.., kv_heads, count, d]
        values.view(shape).transpose(1, 2),
        reading.visible,
        form,
    )
    out.index_copy_(0, reading.rows, attended.reshape(len(q), -1))


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
                slots = torch.add(offsets, blocks[:, None], alpha=sequences.block_size)
                slots = slots.view(-1)[:context_len]
            self._chunks.append(_Chunk(slice(first, first + query_len), context_len, slots))

    def __call__(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        kv_heads = kv.keys.shape[-2]
        heads = qkv.shape[1] - 2 * kv_heads
        for chunk in self._chunks:
            q, k, v = torch.split(qkv[chunk.rows], [heads, kv_heads, kv_heads], dim=1)
            window = form.window_in(chunk.context_len)
            if chunk.slots is not None:
                first_seen = 0 if window is None else chunk.context_len - len(q) + 1 - window
                k, v = kv.gather(chunk.slots[max(0, first_seen) :], qkv.dtype)
            out[chunk.rows] = (
                self._attend(q, k, v, form)
                if window is None and form.softcap is None
                else _attend_in_pieces(q, k, v, form)
            )

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        """Causal attention of the last [query_len] tokens of a context.

        ``q``: [query_len, heads, head_dim]; ``k``, ``v``: [context_len, kv_heads, head_dim].
        Returns [query_len, heads * head_dim].
        """
        query_len, context_len = len(q), len(k)
        if query_len == context_len:
            return _causal(q, k, v, None, form)
        highest = self._mask.max_query
        if query_len <= highest:
            return _causal(q, k, v, self._mask.view(query_len, context_len), form)
        # More queries than the mask has rows: a prefix of them sees a prefix of the context.
        head, end = query_len - highest, context_len - highest
        return torch.cat(
            (
                self._attend(q[:head], k[:end], v[:end], form),
                _causal(q[head:], k, v, self._mask.view(highest, context_len), form),
            )
        )


def _attend_in_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm
) -> torch.Tensor:
    """As ``GatheredPrefill._attend``; keys before the first query's window may be missing."""
    window = form.window or len(k)
    pieces = []
    for first in range(0, len(q), PIECE_QUERIES):
        rows = q[first : first + PIECE_QUERIES]
        end = len(k) - len(q) + first + len(rows)
        seen = slice(max(0, end - len(rows) + 1 - window), end)
        keys = k[seen]
        ahead = len(keys) - len(rows)
        mask = torch.ones(len(rows), len(keys), dtype=torch.bool, device=q.device)
        mask = mask.tril_(ahead).triu_(ahead + 1 - window)
        pieces.append(_causal(rows, keys, v[seen], mask, form))
    return torch.cat(pieces)


def _causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    form: AttentionForm,
) -> torch.Tensor:
    """One sequence's [query_len, heads * head_dim]; without ``mask``, k is as long as q."""
    query_len, _, head_dim = q.shape
    context_len, kv_heads, _ = k.shape
    # [kv_heads, group, q, d]
    grouped = q.view(query_len, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    shape = (kv_heads, grouped.shape[1], context_len, head_dim)
    out = _attend(
        grouped,
        k.transpose(0, 1)[:, None].expand(shape),
        v.transpose(0, 1)[:, None].expand(shape),
        mask,
        form,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(query_len, -1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    form: AttentionForm,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention, which has no cap of scores."""
    if form.softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=is_causal, scale=form.scale
        )
    scores = q.float() @ k.float().transpose(-1, -2) * form.scale_for(q.shape[-1])
    scores = form.softcap * torch.tanh(scores / form.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1).to(v.dtype) @ v
