"""Attention of queries to one tile of keys and values: the loop body of decode and prefill."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from llorch_worker.kernels.interface import AttentionForm

LOWEST = tl.constexpr(-3.0e38)
"""Where the largest score begins. Not -inf: the difference to a tile without a visible key would be
NaN."""


def constants_of(form: AttentionForm) -> dict[str, float]:
    """What the kernels are compiled for: a model has at most one window and one cap."""
    return {"WINDOW": form.window or 0, "CAP": math.log2(math.e) * (form.softcap or 0.0)}


@triton.jit
def attend_tile(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    place,
    known,
    visible,
    highest,
    mass,
    total,
    log2_scale,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add one tile to an online softmax.

    ``q``: [queries, dim]; ``table``: a sequence's block table; ``place``: [tile], positions in its
    context; ``known``: [tile], whether they exist; ``visible``: [queries or 1, tile]. ``highest``,
    ``mass`` (both [queries]) and ``total`` ([queries, dim]) are the softmax so far; returns them
    with this tile added. CAP: of scores, as powers of two; 0 is none.
    """
    at = tl.arange(0, BLOCK_DIM)
    block = tl.load(table + place // BLOCK_SIZE, mask=known, other=0)
    cell = (block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * KV_HEADS + kv_head
    # Nothing beyond the context is read: it may be another sequence's NaN.
    inside = known[:, None] & (at[None, :] < DIM)
    k = tl.load(keys + cell[:, None] * DIM + at[None, :], mask=inside, other=0.0)
    if SCALED:
        k = k.to(tl.float32)
    k = k.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale  # [queries, tile]
    if SCALED:
        scores *= tl.load(key_scales + cell, mask=known, other=0.0)[None, :]
    if CAP != 0.0:  # CAP * tanh(scores / CAP), as 1 - 2 / (e^2x + 1)
        scores = CAP - 2.0 * CAP / (tl.exp2(scores * (2.885390082 / CAP)) + 1.0)
    scores = tl.where(visible, scores, float("-inf"))
    peak = tl.maximum(highest, tl.max(scores, axis=1))
    fade = tl.exp2(highest - peak)
    weights = tl.exp2(scores - peak[:, None])
    mass = mass * fade + tl.sum(weights, axis=1)
    if SCALED:
        weights *= tl.load(value_scales + cell, mask=known, other=0.0)[None, :]
    v = tl.load(values + cell[:, None] * DIM + at[None, :], mask=inside, other=0.0)
    if SCALED:
        v = v.to(tl.float32)
    v = v.to(q.dtype)
    total = total * fade[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    return peak, mass, total
