"""How many KV blocks an engine keeps, and the cache of that size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from llorch_worker.cache import CacheShape, UnifiedCache
from llorch_worker.contract import ModelLoadFailed
from llorch_worker.engine.memory.free_memory import free_bytes
from llorch_worker.engine.memory.load_errors import mib, part_of_load
from llorch_worker.model import LlamaConfig
from llorch_worker.settings import KvDtype

# Of what is free once the weights are loaded. The rest is for activations, for other processes on
# a machine's own memory, and for the allocator's fragments on a card.
CPU_SHARE = 0.6
CUDA_SHARE = 0.9


BLOCK_SIZE_TOKENS = 16


def cache_shape(
    config: LlamaConfig,
    max_context: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KvDtype = "auto",
    decode_rows: int = 0,
) -> CacheShape:
    """The shape of a cache for ``config``."""
    return CacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        max_context=max_context,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        decode_rows=decode_rows,
        vocab_size=config.vocab_size,
    )


def plan_blocks(
    required_bytes: Callable[[int], Mapping[str, int]],
    *,
    block_size: int,
    max_context: int,
    max_sequences: int,
    available_bytes: int,
    kv_cache_bytes: int | None = None,
) -> int:
    """The number of KV blocks: what ``kv_cache_bytes`` holds, else ``max_sequences`` full contexts
    or as much of them as ``available_bytes`` less the tables and masks has room for.

    Args:
        required_bytes: bytes of the cache by part for a number of blocks.
        block_size: tokens in a block.

    Raises:
        ModelLoadFailed: ``kv_cache_bytes``, or else one full context, does not fit; says what is
            needed and what there is.
    """
    one_context = -(-max_context // block_size)
    fixed = {part: size for part, size in required_bytes(0).items() if size}
    block_bytes = sum(required_bytes(1).values()) - sum(fixed.values())
    room = available_bytes - sum(fixed.values())
    wanted = one_context * max_sequences
    if kv_cache_bytes is not None:
        wanted = kv_cache_bytes // block_bytes
        if kv_cache_bytes > room:
            raise ModelLoadFailed(
                f"kv_cache_bytes asks for {mib(kv_cache_bytes)}, and there is "
                f"{mib(max(0, room))} beside weights, tables and masks; lower it or free memory"
            )
    blocks = min(wanted, room // block_bytes)
    if blocks >= one_context:
        return blocks
    needed = one_context * block_bytes
    parts = ", ".join(f"{part} {mib(size)}" for part, size in {"kv": needed, **fixed}.items())
    if kv_cache_bytes is not None and kv_cache_bytes < needed:
        raise ModelLoadFailed(
            f"the KV cache of one context of {max_context} tokens needs {mib(needed)}, and "
            f"kv_cache_bytes allows {mib(kv_cache_bytes)}; raise it or lower max_context"
        )
    raise ModelLoadFailed(
        f"one context of {max_context} tokens needs {mib(needed + sum(fixed.values()))} "
        f"({parts}), and there is {mib(max(0, available_bytes))} beside the weights; "
        "lower max_context or free memory"
    )


def allocate_cache(
    config: LlamaConfig,
    max_context: int,
    *,
    max_sequences: int,
    kv_cache_bytes: int | None,
    workspace_bytes: int = 0,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KvDtype = "auto",
    decode_rows: int = 0,
) -> UnifiedCache:
    """The cache that :func:`plan_blocks` plans for what is free on ``device`` now, with
    ``workspace_bytes`` left for the steps."""
    shape = cache_shape(
        config,
        max_context,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        decode_rows=decode_rows,
    )

    def required_bytes(blocks: int) -> dict[str, int]:
        return UnifiedCache.required_bytes(shape, blocks)

    num_blocks = plan_blocks(
        lambda blocks: required_bytes(blocks) | {"workspace": workspace_bytes},
        block_size=shape.block_size,
        max_context=max_context,
        max_sequences=max_sequences,
        available_bytes=available_bytes(device),
        kv_cache_bytes=kv_cache_bytes,
    )
    with part_of_load("the cache", device, sum(required_bytes(num_blocks).values())):
        return UnifiedCache.allocate(shape, num_blocks)


def require_room(weight_bytes: int, device: torch.device) -> None:
    """Raises ``ModelLoadFailed`` unless weights of this size fit on ``device`` now."""
    free = free_bytes(device)
    if weight_bytes > free:
        raise ModelLoadFailed(
            f"the weights need {mib(weight_bytes)} on {device}, and there is {mib(free)} free; "
            "take a smaller dtype or model, or free memory"
        )


def available_bytes(device: torch.device) -> int:
    """Memory on ``device`` that the cache may take now."""
    return int(free_bytes(device) * (CUDA_SHARE if device.type == "cuda" else CPU_SHARE))
