"""Rotates queries and keys, and writes keys and values to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llorch_worker.kernels.layer_kv import LayerKV

_HEADS = 8
"""Heads per program: enough work for its 4 warps with heads of 128."""


def rope_and_write(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, kv: LayerKV
) -> None:
    """See ``Ops.rope_and_write``."""
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = kv.keys.shape[-2]
    half = head_dim // 2
    _rope_and_write[(tokens, triton.cdiv(all_heads, _HEADS))](
        qkv,
        cos,
        sin,
        slots,
        kv.keys,
        kv.values,
        kv.keys if kv.key_scales is None else kv.key_scales,
        kv.values if kv.value_scales is None else kv.value_scales,
        qkv.stride(0),
        NUM_HEADS=all_heads - 2 * kv_heads,
        NUM_KV_HEADS=kv_heads,
        HALF=half,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(half),
        KV_DTYPE=kv.kv_dtype,
    )


@triton.jit
def _rope_and_write(
    qkv,
    cos,
    sin,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    token_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_DTYPE: tl.constexpr,
):
    """Some heads of one token: its Q and K heads are rotated in place, K and V stored.

    KV_DTYPE is how the cache keeps numbers: "auto", "fp8" or "int8".
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (at < HALF)
    here = qkv + token * token_stride + head * (2 * HALF) + at
    first = tl.load(here, mask=inside, other=0.0)
    second = tl.load(here + HALF, mask=inside, other=0.0)
    dtype = first.dtype
    angle = token * HALF + at
    c = tl.load(cos + angle, mask=at < HALF, other=0.0)
    s = tl.load(sin + angle, mask=at < HALF, other=0.0)
    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    rotates = head < NUM_HEADS + NUM_KV_HEADS
    # Rounded before it is stored, so that the cache holds the same values as the twin's.
    first = tl.where(rotates, wide_first * c - wide_second * s, wide_first).to(dtype)
    second = tl.where(rotates, wide_second * c + wide_first * s, wide_second).to(dtype)
    tl.store(here, first, mask=inside & rotates)
    tl.store(here + HALF, second, mask=inside & rotates)

    slot = tl.load(slots + token)
    is_key = inside & (head >= NUM_HEADS) & rotates
    is_value = inside & (head >= NUM_HEADS + NUM_KV_HEADS)
    key_head = head - NUM_HEADS
    value_head = key_head - NUM_KV_HEADS
    if KV_DTYPE == "auto":
        stored_first = first
        stored_second = second
    elif KV_DTYPE == "fp8":
        stored_first = tl.clamp(first.to(tl.float32), -448.0, 448.0).to(tl.float8e4nv)
        stored_second = tl.clamp(second.to(tl.float32), -448.0, 448.0).to(tl.float8e4nv)
    else:
        wide_first = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        largest = tl.maximum(
            tl.max(tl.abs(wide_first), axis=1), tl.max(tl.abs(wide_second), axis=1)
        )
        scale = tl.maximum(largest, 1e-20) / 127.0
        stored_first = _nearest_int8(wide_first, scale[:, None])
        stored_second = _nearest_int8(wide_second, scale[:, None])
        row = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        of_key = (row >= NUM_HEADS) & (row < NUM_HEADS + NUM_KV_HEADS)
        of_value = (row >= NUM_HEADS + NUM_KV_HEADS) & (row < NUM_HEADS + 2 * NUM_KV_HEADS)
        tl.store(key_scales + slot * NUM_KV_HEADS + row - NUM_HEADS, scale, mask=of_key)
        tl.store(
            value_scales + slot * NUM_KV_HEADS + row - NUM_HEADS - NUM_KV_HEADS,
            scale,
            mask=of_value,
        )
    key = keys + (slot * NUM_KV_HEADS + key_head) * (2 * HALF) + at
    value = values + (slot * NUM_KV_HEADS + value_head) * (2 * HALF) + at
    tl.store(key, stored_first, mask=is_key)
    tl.store(key + HALF, stored_second, mask=is_key)
    tl.store(value, stored_first, mask=is_value)
    tl.store(value + HALF, stored_second, mask=is_value)


@triton.jit
def _nearest_int8(values, scale):
    """``values / scale``, rounded half up."""
    return tl.floor(values / scale + 0.5).to(tl.int8)
