"""Attention in plain torch whose rounding depends on nothing but the token's own context.

Every product has one shape: ``QUERIES`` tokens of one KV head's group against ``KEYS`` keys,
counted from the beginning of the context. Shorter pieces are padded. Libraries choose the order of
a sum by a product's shape, so other shapes would round the same token differently in decode and in
prefill, alone and in company.

Keys beyond a token's own, and those before its window, get the weight 0, and adding their products
changes no bit.
"""

from __future__ import annotations

import math

import torch

from llorch_worker.kernels.grouping import in_groups
from llorch_worker.kernels.interface import AttentionForm, AttentionRoom, PagedSequences
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.upload import on_device

QUERIES = 8
KEYS = 64
AT_ONCE = 8
"""Tiles of queries that share a call, and see as many keys as the one that sees most."""
KEYS_AT_ONCE = 16384
"""The most keys of all of them: each has its own copies. A tile that sees more is alone."""


def tiled_bytes(room: AttentionRoom) -> int:
    """The most memory that :class:`TiledAttention` takes."""
    heads, head_dim = room.heads, room.head_dim
    cell, item, wide = room.kv_heads * head_dim, room.dtype.itemsize, torch.float32.itemsize
    context = -(-room.max_context // KEYS) * KEYS
    at_once = min(AT_ONCE * context, max(context, KEYS_AT_ONCE))
    # Slots, and a byte for each query and key; a sequence's last tile is padded.
    queries = room.max_step_tokens + (QUERIES - 1) * room.max_sequences
    kept = len(room.windows) * context * (8 * room.max_sequences + queries)
    rows = 5 * AT_ONCE * QUERIES * heads * head_dim * wide
    # Keys and values as they are gathered, and in tiles; one of them in float32 on its way.
    gathered = at_once * cell * (2 * item + 2 * wide + (wide if item < wide else 0))
    # In tiles, and a copy for each of several tiles of queries, which see half as many at most.
    copied = min((1 + AT_ONCE) * context, 3 * KEYS_AT_ONCE // 2)
    tiled = 2 * wide * cell * max(at_once, copied)
    # For each key the queries, and their scores twice, or once beside the result.
    query, scores = QUERIES * head_dim * wide // KEYS, QUERIES * wide
    attended = at_once * heads * (query + max(2 * scores, scores + query))
    return kept + rows + max(gathered, tiled + attended)


class TiledAttention:
    """Any number of new tokens of each sequence; see ``PagedAttention``."""

    def __init__(self, sequences: PagedSequences) -> None:
        self._sequences = sequences
        self._groups: dict[int | None, list[_Group]] = {}

    def __call__(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        window = form.window_in(max(self._sequences.context_lengths))
        groups = self._groups.get(window)
        if groups is None:
            groups = self._groups[window] = _groups(self._sequences, window)
        for group in groups:
            group.attend(qkv, kv, out, form)


def _groups(sequences: PagedSequences, window: int | None) -> list[_Group]:
    def fits(count: int, longest: int) -> bool:
        return count <= _at_once(_tiles(longest, 1, window))

    # Decodes are gathered together, sequences with more new tokens one by one.
    contexts = sequences.context_lengths
    if max(sequences.query_lengths) == 1:
        members = in_groups(contexts, fits)
    else:
        members = [slice(at, at + 1) for at in range(len(contexts))]
    return [_Group(sequences, each, window) for each in members]


def _tiles(longest: int, new: int, window: int | None) -> int:
    """How many tiles of keys the ``new`` last tokens of a context see."""
    # A window's keys may begin and end anywhere in a tile.
    touched = ((window or longest) + new - 1 + KEYS - 2) // KEYS + 1
    return min(-(-longest // KEYS), touched)


def _at_once(tiles: int) -> int:
    """How many tiles of queries share a call if each sees so many of keys."""
    return max(1, min(AT_ONCE, KEYS_AT_ONCE // (tiles * KEYS)))


class _Group:
    """Sequences with one new token each, or one sequence with any number."""

    def __init__(self, sequences: PagedSequences, members: slice, window: int | None) -> None:
        device, size = sequences.block_tables.device, sequences.block_size
        tables = sequences.block_tables[members]
        longest, new = max(sequences.context_lengths[members]), sequences.query_lengths[members][0]
        contexts = sequences.device_contexts
        if contexts is None:
            contexts = on_device(sequences.context_lengths, torch.int64, device)
        lengths = contexts[members, None]
        reach = window or longest
        self._count, self._tiles = len(tables), _tiles(longest, new, window)
        first_seen = (lengths - new + 1 - reach).clamp_(min=0)
        places = first_seen // KEYS * KEYS + torch.arange(self._tiles * KEYS, device=device)
        # Padding repeats tokens that are seen: masked values are still multiplied, and a NaN from
        # another sequence's block would pass through the mask.
        own = torch.minimum(places.clamp(min=first_seen), lengths - 1)
        self._slots = torch.add(own % size, tables.gather(1, own // size), alpha=size).view(-1)
        first_rows = on_device(sequences.first_rows[members], torch.int64, device)[:, None]
        self._queries: list[tuple[torch.Tensor, torch.Tensor, slice]] = []
        skipped = max(0, longest - new + 1 - reach) // KEYS
        step = _at_once(self._tiles) * QUERIES
        for first in range(0, new, step):
            end = min(first + step, new)
            padded = -(-(end - first) // QUERIES) * QUERIES
            # Padding repeats the last new token, and writes its result again.
            offsets = torch.arange(first, first + padded, device=device).clamp_(max=new - 1)
            positions = (lengths - new + offsets).view(-1, 1, QUERIES, 1, 1)
            tiles = slice(0, self._tiles)
            if new > 1:  # one sequence
                begin = max(0, longest - new + first + 1 - reach) // KEYS
                tiles = slice(begin - skipped, -(-(longest - new + end) // KEYS) - skipped)
            seen = places[:, tiles.start * KEYS : tiles.stop * KEYS].view(self._count, 1, 1, 1, -1)
            hidden = seen > positions
            if window is not None:
                hidden |= seen <= positions - window
            self._queries.append(((first_rows + offsets).view(-1), hidden, tiles))

    def attend(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        kv_heads, head_dim = kv.keys.shape[-2:]
        shape = (self._count, self._tiles, KEYS, kv_heads, head_dim)
        keys, values = (
            # [tiles, sequences, kv_heads, KEYS, d], so that the first tiles are contiguous
            cells.float().view(shape).permute(1, 0, 3, 2, 4).contiguous()
            for cells in kv.gather(self._slots, qkv.dtype)
        )
        heads = qkv[:, : qkv.shape[1] - 2 * kv_heads]
        for rows, hidden, tiles in self._queries:
            q = heads.index_select(0, rows).float() * form.scale_for(head_dim)
            q = q.view(-1, QUERIES, kv_heads, q.shape[1] // kv_heads, head_dim).transpose(1, 2)
            attended = _attend(q, keys[tiles], values[tiles], hidden, form.softcap)
            attended = attended.transpose(1, 2).reshape(len(rows), -1)
            out.index_copy_(0, rows, attended.to(out.dtype))


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    softcap: float | None,
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
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.permute(1, 2, 3, 4, 0, 5).flatten(4).masked_fill_(hidden, -math.inf)
    # Under one name, because no two of them are needed at once.
    # A softmax adds lane by lane along the row; zeros at its ends change nothing.
    scores = scores.softmax(-1).view(count, kv_heads, rows, tiles, KEYS)
    scores = scores.permute(3, 0, 1, 2, 4).reshape(-1, rows, KEYS)
    total: torch.Tensor
    total, *others = torch.bmm(scores, values).view(*each, -1)
    for piece in others:
        total = total + piece
    return total.view(count, kv_heads, QUERIES, group, head_dim)
