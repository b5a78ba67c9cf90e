"""Everything a process keeps between steps, allocated once: KV blocks, RoPE tables, causal mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llorch_worker.cache.block_pool import BlockPool
from llorch_worker.cache.causal_masks import CausalMasks
from llorch_worker.cache.kv import PagedKV
from llorch_worker.cache.rope_tables import RopeScaling, RopeTables

DEFAULT_BLOCK_SIZE_TOKENS = 16
DEFAULT_MAX_QUERY_TOKENS = 1024
"""Rows of the causal mask; attention takes a longer chunk in pieces of so many tokens."""


@dataclass(frozen=True)
class UnifiedCache:
    """The one cache of a process. It is passed to the model, never reached for."""

    kv: PagedKV
    rope: RopeTables
    masks: CausalMasks
    blocks: BlockPool
    block_size: int
    max_context: int

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        rope_theta: float,
        rope_scaling: RopeScaling | None,
        max_context: int,
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE_TOKENS,
        max_query_tokens: int = DEFAULT_MAX_QUERY_TOKENS,
        dtype: torch.dtype,
        device: torch.device,
    ) -> UnifiedCache:
        """Allocate all parts; ``dtype`` is that of the KV blocks."""
        return cls(
            kv=PagedKV(
                num_layers=num_layers,
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                device=device,
            ),
            rope=RopeTables(
                head_dim=head_dim,
                theta=rope_theta,
                scaling=rope_scaling,
                max_context=max_context,
                device=device,
            ),
            masks=CausalMasks(max_query=max_query_tokens, max_context=max_context, device=device),
            blocks=BlockPool(num_blocks),
            block_size=block_size,
            max_context=max_context,
        )

    @staticmethod
    def required_bytes(
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        rope_theta: float,  # noqa: ARG004 - the same arguments as allocate takes
        rope_scaling: RopeScaling | None,  # noqa: ARG004
        max_context: int,
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE_TOKENS,
        max_query_tokens: int = DEFAULT_MAX_QUERY_TOKENS,
        dtype: torch.dtype,
        device: torch.device,  # noqa: ARG004
    ) -> dict[str, int]:
        """What ``allocate`` with the same arguments would take, by part; allocates nothing."""
        slots = num_blocks * block_size
        return {
            "kv": 2 * num_layers * slots * num_kv_heads * head_dim * dtype.itemsize,
            "rope": 2 * max_context * (head_dim // 2) * torch.float32.itemsize,
            "masks": min(max_query_tokens, max_context) * max_context,
        }

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes held, by part: ``kv``, ``rope``, ``masks``."""
        return {"kv": self.kv.nbytes, "rope": self.rope.nbytes, "masks": self.masks.nbytes}
