"""Everything a process keeps between steps, allocated once: KV blocks, RoPE tables, causal mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llorch_worker.cache.block_pool import BlockPool
from llorch_worker.cache.causal_masks import CausalMasks
from llorch_worker.cache.decode_buffers import DecodeBuffers
from llorch_worker.cache.kv import PagedKV
from llorch_worker.cache.rope_tables import RopeTables
from llorch_worker.cache.shape import CacheShape
from llorch_worker.cache.window_pool import WindowPool


@dataclass(frozen=True)
class UnifiedCache:
    """The one cache of a process. It is passed to the model, never reached for."""

    shape: CacheShape
    kv: PagedKV
    rope: RopeTables
    masks: CausalMasks
    blocks: BlockPool
    windows: tuple[WindowPool, ...] = ()
    """For each group of windowed layers, in the order of ``CacheShape.groups``."""
    decode: DecodeBuffers | None = None
    """Buffers of recorded decode steps, if any are recorded."""

    @classmethod
    def allocate(cls, shape: CacheShape, num_blocks: int) -> UnifiedCache:
        """Allocates all parts, with ``num_blocks`` KV blocks for sequences."""
        counts = shape.block_counts(num_blocks)
        blocks = BlockPool(num_blocks)
        return cls(
            shape=shape,
            kv=PagedKV(shape, _with_scratch(shape, counts)),
            rope=RopeTables(
                shape.ropes,
                head_dim=shape.head_dim,
                max_context=shape.max_context,
                device=shape.device,
            ),
            masks=CausalMasks(
                max_query=shape.max_query_tokens,
                max_context=shape.max_context,
                device=shape.device,
            ),
            blocks=blocks,
            windows=tuple(
                WindowPool(blocks, count, window=group.window, block_size=shape.block_size)
                for group, count in zip(shape.groups, counts, strict=True)
                if group.window is not None
            ),
            decode=DecodeBuffers(shape, scratch_blocks=counts) if shape.decode_rows else None,
        )

    @staticmethod
    def required_bytes(shape: CacheShape, num_blocks: int) -> dict[str, int]:
        """Bytes that ``allocate`` takes: ``kv``, ``kv_scales`` if it is int8, ``rope``, ``masks``,
        and ``decode`` if decode steps are recorded. Allocates nothing."""
        counts = _with_scratch(shape, shape.block_counts(num_blocks))
        parts = PagedKV.required_bytes(shape, counts)
        angles = len(shape.ropes) * shape.max_context * (shape.head_dim // 2)
        parts["rope"] = 2 * angles * torch.float32.itemsize
        parts["masks"] = min(shape.max_query_tokens, shape.max_context) * shape.max_context
        if shape.decode_rows:
            parts["decode"] = DecodeBuffers.required_bytes(shape)
        return parts

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self.shape.block_size

    @property
    def max_context(self) -> int:
        """Tokens that a sequence may hold."""
        return self.shape.max_context

    def parts(self) -> dict[str, object]:
        """The objects that hold the tensors, by name."""
        return {"kv": self.kv, "rope": self.rope, "masks": self.masks, "decode": self.decode}


def _with_scratch(shape: CacheShape, counts: Sequence[int]) -> list[int]:
    """Recorded decode steps write their blank rows to one extra block of each group."""
    return [count + (1 if shape.decode_rows else 0) for count in counts]
