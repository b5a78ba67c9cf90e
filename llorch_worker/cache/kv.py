"""Keys and values of all sequences in blocks of a fixed number of tokens."""

from __future__ import annotations

import torch


class PagedKV:
    """``keys`` and ``values``: [layers, blocks, block_size, kv_heads, head_dim], allocated once.

    A *slot* is a token's place in a layer: ``block * block_size + offset``.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        # Zeros, not empty: attention must never meet a NaN that lay in memory before.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size = block_size
        self.layers = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))
        """Each layer's keys and values, [blocks, block_size, kv_heads, head_dim]: views."""

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
