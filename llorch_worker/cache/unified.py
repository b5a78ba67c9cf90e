"""Everything a process keeps between steps, allocated once: KV blocks, RoPE tables, causal mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llorch_worker.cache.block_pool import BlockPool
from llorch_worker.cache.causal_masks import CausalMasks
from llorch_worker.cache.decode_buffers import DecodeBuffers
from llorch_worker.cache.kv import PagedKV
from llorch_worker.cache.rope_tables import RopeScaling, RopeTables
from llorch_worker.settings import KvDtype

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
    decode: DecodeBuffers | None = None
    """Of recorded decode steps, where there are any."""

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
        kv_dtype: KvDtype = "auto",
        decode_rows: int = 0,
        vocab_size: int = 0,
    ) -> UnifiedCache:
        """Allocate all parts; ``dtype`` is the compute dtype, ``kv_dtype`` how KV blocks keep it.

        With ``decode_rows`` there are buffers for recorded decode steps of so many sequences, and
        one block more than the pool hands out, for rows of no sequence to write to.
        """
        decode = None
        if decode_rows:
            decode = DecodeBuffers(
                rows=decode_rows,
                table_width=-(-max_context // block_size),
                vocab_size=vocab_size,
                scratch_block=num_blocks,
                block_size=block_size,
                device=device,
            )
        return cls(
            kv=PagedKV(
                num_layers=num_layers,
                num_blocks=num_blocks + (1 if decode_rows else 0),
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                device=device,
                kv_dtype=kv_dtype,
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
            decode=decode,
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
        kv_dtype: KvDtype = "auto",
        decode_rows: int = 0,
        vocab_size: int = 0,
    ) -> dict[str, int]:
        """What ``allocate`` with the same arguments would take, by part; allocates nothing."""
        slots = (num_blocks + (1 if decode_rows else 0)) * block_size
        of_slot = PagedKV.slot_bytes(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        parts = {
            **{part: slots * size for part, size in of_slot.items()},
            "rope": 2 * max_context * (head_dim // 2) * torch.float32.itemsize,
            "masks": min(max_query_tokens, max_context) * max_context,
        }
        if decode_rows:
            parts["decode"] = DecodeBuffers.required_bytes(
                rows=decode_rows,
                table_width=-(-max_context // block_size),
                vocab_size=vocab_size,
            )
        return parts

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes held, by part: ``kv`` (and ``kv_scales`` where it is int8), ``rope``, ``masks``,
        and ``decode`` where decode steps are recorded."""
        parts = {
            **self.kv.bytes_by_part(),
            "rope": self.rope.nbytes,
            "masks": self.masks.nbytes,
        }
        if self.decode is not None:
            parts["decode"] = self.decode.nbytes
        return parts
