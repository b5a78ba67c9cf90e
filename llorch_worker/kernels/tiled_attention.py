"""Attention in plain torch whose rounding depends on nothing but the token's own context.

Every product has one shape: ``QUERIES`` tokens of one KV head's group against ``KEYS`` keys,
counted from the beginning of the context. Shorter pieces are padded. Libraries choose the order of
a sum by a product's shape, so other shapes would round the same token differently in decode and in
prefill, alone and in company.

Keys beyond a token's own get the weight 0, and adding their products changes no bit.
"""

from __future__ import annotations

import math

import torch

from llorch_worker.kernels.interface import PagedSequences
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.upload import on_device

QUERIES = 8
KEYS = 64
AT_ONCE = 8
"""Tiles of queries that share a call, and see as many keys as the one that sees most."""


class TiledAttention:
    """Any number of new tokens of each sequence; see ``PagedAttention``."""

    def __init__(self, sequences: PagedSequences) -> None:
        count = len(sequences.first_rows)
        # Decodes are gathered together, sequences with more new tokens one by one.
        size = AT_ONCE if max(sequences.query_lengths) == 1 else 1
        self._groups = [
            _Group(sequences, slice(first, first + size)) for first in range(0, count, size)
        ]

    def __call__(self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor) -> None:
        for group in self._groups:
            group.attend(qkv, kv, out)


class _Group:
    """Sequences with one new token each, or one sequence with any number."""

    def __init__(self, sequences: PagedSequences, members: slice) -> None:
        device, size = sequences.block_tables.device, sequences.block_size
        tables = sequences.block_tables[members]
        longest, new = max(sequences.context_lengths[members]), sequences.query_lengths[members][0]
        contexts = sequences.device_contexts
        if contexts is None:
            contexts = on_device(sequences.context_lengths, torch.int64, device)
        lengths = contexts[members, None]
        self._count, self._tiles = len(tables), -(-longest // KEYS)
        places = torch.arange(self._tiles * KEYS, device=device)
        # Padding repeats the sequence's own last token: masked values are still multiplied, and a
        # NaN from another sequence's block would pass through the mask.
        own = torch.minimum(places, lengths - 1)
        self._slots = (tables.gather(1, own // size) * size + own % size).view(-1)
        first_rows = on_device(sequences.first_rows[members], torch.int64, device)[:, None]
        self._queries: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        for first in range(0, new, AT_ONCE * QUERIES):
            end = min(first + AT_ONCE * QUERIES, new)
            padded = -(-(end - first) // QUERIES) * QUERIES
            # Padding repeats the last new token, and writes its result again.
            offsets = torch.arange(first, first + padded, device=device).clamp_(max=new - 1)
            positions = (lengths - new + offsets).view(-1, 1, QUERIES, 1, 1)
            tiles = -(-(longest - new + end) // KEYS)
            hidden = places[: tiles * KEYS] > positions
            self._queries.append(((first_rows + offsets).view(-1), hidden, tiles))

    def attend(self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor) -> None:
        kv_heads, head_dim = kv.keys.shape[-2:]
        shape = (self._count, self._tiles, KEYS, kv_heads, head_dim)
        keys, values = (
            # [tiles, sequences, kv_heads, KEYS, d], so that the first tiles are contiguous
            cells.float().view(shape).permute(1, 0, 3, 2, 4).contiguous()
            for cells in kv.gather(self._slots, qkv.dtype)
        )
        heads = qkv[:, : qkv.shape[1] - 2 * kv_heads]
        for rows, hidden, tiles in self._queries:
            q = heads.index_select(0, rows).float() * (1 / math.sqrt(head_dim))
            q = q.view(-1, QUERIES, kv_heads, q.shape[1] // kv_heads, head_dim).transpose(1, 2)
            attended = _attend(q, keys[:tiles], values[:tiles], hidden)
            attended = attended.transpose(1, 2).reshape(len(rows), -1)
            out.index_copy_(0, rows, attended.to(out.dtype))


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Softmax(q k) v without what is ``hidden: [count, 1, QUERIES, 1, tiles * KEYS]``.

    ``q``: [count, kv_heads, QUERIES, group, d], scaled; the result has its shape. ``keys``,
    ``values``: [tiles, count or 1, kv_heads, KEYS, d].
    """
    count, kv_heads, _, group, head_dim = q.shape
    tiles, rows = len(keys), QUERIES * group
    each = (tiles, count, kv_heads)
    q = q.reshape(count, kv_heads, rows, head_dim).expand(*each, -1, -1).flatten(0, 2)
    keys = keys.expand(*each, -1, -1).flatten(0, 2)
    values = values.expand(*each, -1, -1).flatten(0, 2)
    scores = torch.bmm(q, keys.transpose(1, 2)).view(*each, QUERIES, group, KEYS)
    scores = scores.permute(1, 2, 3, 4, 0, 5).flatten(4).masked_fill_(hidden, -math.inf)
    # A softmax adds lane by lane along the row; zeros at its end change nothing.
    weights = scores.softmax(-1).view(count, kv_heads, rows, tiles, KEYS).permute(3, 0, 1, 2, 4)
    total: torch.Tensor
    total, *others = torch.bmm(weights.reshape(-1, rows, KEYS), values).view(*each, -1)
    for piece in others:
        total = total + piece
    return total.view(count, kv_heads, QUERIES, group, head_dim)
