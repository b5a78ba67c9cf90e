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
        slots = num_blocks * block_size
        self._layer_keys = list(self.keys.view(num_layers, slots, num_kv_heads, head_dim).unbind())
        self._layer_values = list(
            self.values.view(num_layers, slots, num_kv_heads, head_dim).unbind()
        )

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store ``keys``, ``values``: [tokens, kv_heads, head_dim] at ``slots``: [tokens] int64."""
        self._layer_keys[layer].index_copy_(0, slots, keys)
        self._layer_values[layer].index_copy_(0, slots, values)

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of what lies at ``slots``: [n] int64, as two [n, kv_heads, head_dim]."""
        return (
            self._layer_keys[layer].index_select(0, slots),
            self._layer_values[layer].index_select(0, slots),
        )

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
