"""Keys and values of all sequences in blocks of a fixed number of tokens."""

from __future__ import annotations

import torch

from llorch_worker.cache.shape import CacheShape
from llorch_worker.kernels import Arena, LayerKV

_STORED_DTYPE = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class PagedKV:
    """``keys`` and ``values``: [layers, blocks, block_size, kv_heads, head_dim], allocated once.
    On the CPU a page of them takes memory once it is written to.

    A *slot* is a token's place in a layer: ``block * block_size + offset``.
    """

    def __init__(self, shape: CacheShape, num_blocks: int) -> None:
        layers = shape.num_layers
        cells = (layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        stored = _STORED_DTYPE.get(shape.kv_dtype, shape.dtype)
        # Zeros, not empty: attention must never read a NaN from uninitialised memory.
        self.keys = _zeros(cells, stored, shape.device)
        self.values = _zeros(cells, stored, shape.device)
        self.dtype = shape.dtype
        self._scaled = shape.kv_dtype == "int8"
        if self._scaled:
            self._key_scales = _zeros(cells[:-1], torch.float32, shape.device)
            self._value_scales = _zeros(cells[:-1], torch.float32, shape.device)
        self.layers = [self._layer(layer) for layer in range(layers)]
        """Views of each layer's part."""

    def _layer(self, layer: int) -> LayerKV:
        if not self._scaled:
            return LayerKV(self.keys[layer], self.values[layer])
        return LayerKV(
            self.keys[layer], self.values[layer], self._key_scales[layer], self._value_scales[layer]
        )

    @staticmethod
    def slot_bytes(shape: CacheShape) -> dict[str, int]:
        """Bytes of one token's keys and values in all layers, by part."""
        heads = 2 * shape.num_layers * shape.num_kv_heads
        stored = _STORED_DTYPE.get(shape.kv_dtype, shape.dtype)
        parts = {"kv": heads * shape.head_dim * stored.itemsize}
        if shape.kv_dtype == "int8":
            parts["kv_scales"] = heads * torch.float32.itemsize
        return parts

    def bytes_by_part(self) -> dict[str, int]:
        """Bytes held: ``kv``, and ``kv_scales`` if they are int8."""
        parts = {"kv": self.keys.nbytes + self.values.nbytes}
        if self._scaled:
            parts["kv_scales"] = self._key_scales.nbytes + self._value_scales.nbytes
        return parts


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return Arena().zeros(*shape, dtype=dtype)
