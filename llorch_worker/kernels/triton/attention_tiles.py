"""How attention is divided into tiles on a card."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

DATA_CENTRE_SHARED_BYTES = 160 * 1024
"""A100 has 163 kB for a program, H100 and later 227; other cards since Ampere have 99."""

MOST_ROWS = 128


@dataclass(frozen=True)
class AttentionTiles:
    """The shape of a program's products, chosen so that no variant spills registers or needs more
    shared memory than the card has."""

    rows: int
    """Queries: new tokens times the heads of a group, padded."""
    tokens: int
    """New tokens of a tile."""
    tile: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        block_dim: int,
        group: int,
        longest_query: int,
        shared_bytes: int,
    ) -> AttentionTiles:
        """For queries in ``dtype`` of which a sequence has up to ``longest_query``; 1 gives the
        shapes of decode."""
        padded = padded_group(group)
        wanted = max(16, triton.next_power_of_2(longest_query) * padded)
        if dtype is torch.float32:  # it bypasses the tensor cores, and registers hold everything
            rows = max(padded, min(32, wanted))
            return cls(rows, rows // padded, 32 if rows == 16 else 16, num_warps=8, num_stages=1)
        roomy = shared_bytes >= DATA_CENTRE_SHARED_BYTES
        most = MOST_ROWS if block_dim <= 64 or (block_dim == 128 and roomy) else 64
        rows = max(padded, min(most, wanted))
        tile = 64 if rows == MOST_ROWS and block_dim == 128 else 32
        warps = 8 if rows == MOST_ROWS or (rows == 64 and block_dim > 128) else 4
        return cls(rows, rows // padded, tile, warps, num_stages=3 if rows == 16 else 2)


MAX_REGISTERS = 255
"""A thread's. Left alone, ptxas spills some to fit more programs on a processor."""


def padded_group(group: int) -> int:
    """The query heads of a KV head, padded to a power of two."""
    return int(triton.next_power_of_2(group))
