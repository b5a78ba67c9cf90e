"""Paged caches of random sequences, and attention over them by its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels import PLAIN, AttentionForm, PagedSequences
from llorch_worker.kernels.layer_kv import LayerKV
from tests.kernels.interpreter import DEVICE

BLOCK_SIZE = 16


def layer_kv(
    blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: KvDtype = "auto"
) -> LayerKV:
    """A layer whose cells are all NaN; int8 has no NaN, so its scales are."""
    shape = (blocks, BLOCK_SIZE, kv_heads, head_dim)
    stored = {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[kv_dtype]

    def cells() -> torch.Tensor:
        if kv_dtype == "int8":
            return torch.full(shape, 127, dtype=stored, device=DEVICE)
        return torch.full(shape, math.nan, device=DEVICE).to(stored)

    def scales() -> torch.Tensor | None:
        return torch.full(shape[:-1], math.nan, device=DEVICE) if kv_dtype == "int8" else None

    return LayerKV(cells(), cells(), scales(), scales())


@dataclass(frozen=True)
class Scene:
    """Ragged sequences whose blocks are in random order among blocks of NaN."""

    contexts: tuple[int, ...]
    query_lengths: tuple[int, ...]
    qkv: torch.Tensor
    """[tokens, heads + 2 * kv_heads, head_dim], as rope_and_write leaves it."""
    kv: LayerKV
    k: list[torch.Tensor]
    """Keys of each sequence's context, as stored: [context, kv_heads, head_dim]."""
    v: list[torch.Tensor]
    exact: list[tuple[torch.Tensor, torch.Tensor]]
    """Both in float32."""
    sequences: PagedSequences
    """Their rows do not begin at row 0, and have gaps."""

    def forget_before(self, window: int | None) -> None:
        """Fill with NaN the blocks that lie before the window of a sequence's first new token."""
        if window is None:
            return
        for i, table in enumerate(self.sequences.block_tables):
            first_seen = max(0, self.contexts[i] - self.query_lengths[i] + 1 - window)
            for part in (self.kv.keys, self.kv.values, self.kv.key_scales, self.kv.value_scales):
                if part is not None and part.is_floating_point():
                    gone = table[: first_seen // BLOCK_SIZE]
                    part[gone] = torch.full((), math.nan, device=DEVICE).to(part.dtype)

    def zeros(self) -> torch.Tensor:
        """Room for the kernels' result: [tokens, heads * head_dim]."""
        kv_heads, head_dim = self.k[0].shape[1:]
        return self.qkv.new_zeros(len(self.qkv), (self.qkv.shape[1] - 2 * kv_heads) * head_dim)

    def expected(self, form: AttentionForm = PLAIN, *, exact: bool = False) -> torch.Tensor:
        """[tokens, heads * head_dim] by the definition, in float64; 0 in rows without a token.
        ``exact``: of what the cache's codes stand for, not rounded to the dtype of the queries."""
        kv_heads, head_dim = self.k[0].shape[1:]
        heads = self.qkv.shape[1] - 2 * kv_heads
        out = torch.zeros(len(self.qkv), heads, head_dim, dtype=torch.float64, device=DEVICE)
        for i, first in enumerate(self.sequences.first_rows):
            count, context = self.query_lengths[i], self.contexts[i]
            q = self.qkv[first : first + count, :heads].double()
            keys, values = self.exact[i] if exact else (self.k[i], self.v[i])
            k = keys.double().repeat_interleave(heads // kv_heads, dim=1)
            v = values.double().repeat_interleave(heads // kv_heads, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * (form.scale or 1 / math.sqrt(head_dim))
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            place = torch.arange(context, device=DEVICE)
            position = place[context - count :, None]
            unseen = (place > position) | (place <= position - (form.window or context))
            weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
            out[first : first + count] = torch.einsum("hqk,khd->qhd", weights, v)
        return out.flatten(1)


def scene(
    contexts: Sequence[int],
    query_lengths: Sequence[int] | None = None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: KvDtype = "auto",
    seed: int = 0,
) -> Scene:
    generator = torch.Generator().manual_seed(seed)

    def randoms(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    queries = tuple(query_lengths or [1] * len(contexts))
    needed = [-(-context // BLOCK_SIZE) for context in contexts]
    kv = layer_kv(2 * sum(needed) + 3, kv_heads, head_dim, dtype, kv_dtype)
    free = list(range(len(kv.keys)))
    Random(seed).shuffle(free)
    tables = torch.zeros(len(contexts), max(needed) + 2, dtype=torch.int32)
    ks, vs, exact, first_rows = [], [], [], []
    row = 1
    for i, context in enumerate(contexts):
        blocks = torch.tensor([free.pop() for _ in range(needed[i])])
        tables[i, : needed[i]] = blocks
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:context]
        slots = slots.to(DEVICE)
        kv.write(slots, randoms(context, kv_heads, head_dim), randoms(context, kv_heads, head_dim))
        k, v = kv.gather(slots, dtype)
        ks.append(k)
        vs.append(v)
        exact.append(kv.gather(slots, torch.float32))
        first_rows.append(row)
        row += queries[i] + 1
    qkv = randoms(row, heads + 2 * kv_heads, head_dim)
    for i, first in enumerate(first_rows):
        last = slice(len(ks[i]) - queries[i], None)
        qkv[first : first + queries[i], heads : heads + kv_heads] = ks[i][last]
        qkv[first : first + queries[i], heads + kv_heads :] = vs[i][last]
    return Scene(
        contexts=tuple(contexts),
        query_lengths=queries,
        qkv=qkv,
        kv=kv,
        k=ks,
        v=vs,
        exact=exact,
        sequences=PagedSequences(
            first_rows=tuple(first_rows),
            query_lengths=queries,
            context_lengths=tuple(contexts),
            block_tables=tables.to(DEVICE),
            block_size=BLOCK_SIZE,
        ),
    )
