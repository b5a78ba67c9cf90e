"""Keys and values of all sequences in blocks of a fixed number of tokens."""

from __future__ import annotations

import torch

from llorch_worker.kernels import Arena, LayerKV
from llorch_worker.settings import KvDtype

_STORED_DTYPE = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


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
        kv_dtype: KvDtype = "auto",
    ) -> None:
        """``dtype`` is the compute dtype, in which ``kv_dtype`` ``auto`` stores keys and values."""
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        # Zeros, not empty: attention must never meet a NaN that lay in memory before.
        stored = _STORED_DTYPE.get(kv_dtype, dtype)
        self.keys = _zeros(shape, stored, device)
        self.values = _zeros(shape, stored, device)
        scales = shape[:-1] if kv_dtype == "int8" else (num_layers, 0)
        self._key_scales = torch.zeros(scales, device=device)
        self._value_scales = torch.zeros(scales, device=device)
        self.block_size = block_size
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.layers = [self._layer(layer) for layer in range(num_layers)]
        """Views of each layer's part."""

    def _layer(self, layer: int) -> LayerKV:
        if self.kv_dtype != "int8":
            return LayerKV(self.keys[layer], self.values[layer])
        return LayerKV(
            self.keys[layer],
            self.values[layer],
            self._key_scales[layer],
            self._value_scales[layer],
        )

    @staticmethod
    def slot_bytes(
        *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: KvDtype
    ) -> dict[str, int]:
        """Bytes of one token's keys and values in all layers, by part."""
        heads = 2 * num_layers * num_kv_heads
        parts = {"kv": heads * head_dim * _STORED_DTYPE.get(kv_dtype, dtype).itemsize}
        if kv_dtype == "int8":
            parts["kv_scales"] = heads * torch.float32.itemsize
        return parts

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes held: ``kv`` and, where they are int8, ``kv_scales``."""
        parts = {"kv": self.keys.nbytes + self.values.nbytes}
        if self.kv_dtype == "int8":
            parts["kv_scales"] = self._key_scales.nbytes + self._value_scales.nbytes
        return parts


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # In huge pages: to touch ten gigabytes for the first time takes seconds in small ones.
    return Arena().empty(*shape, dtype=dtype).zero_()
