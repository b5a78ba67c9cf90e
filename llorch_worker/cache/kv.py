"""Keys and values of all sequences in blocks of a fixed number of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from llorch_worker.cache.shape import CacheShape
from llorch_worker.kernels import Arena, LayerKV

_STORED_DTYPE = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


class Places(NamedTuple):
    """Where sequences and their new tokens are in the cells of one group of layers."""

    block_tables: torch.Tensor
    """[sequences, max_blocks] int32: KV blocks of each sequence in order, then any. Entries
    before the window may hold any block id, too."""
    slots: torch.Tensor
    """[tokens] int64: the place of each new token in a layer, ``block * block_size + offset``."""


class PagedKV:
    """``groups``: the cells of each group of layers, allocated once: ``keys`` and ``values``
    [layers, blocks, block_size, kv_heads, head_dim]. On the CPU a page of them takes memory once it
    is written to.
    """

    def __init__(self, shape: CacheShape, counts: Sequence[int]) -> None:
        """``counts``: the blocks of each group."""
        self.dtype = shape.dtype
        self.groups = [
            _cells(shape, len(group.layers), count)
            for group, count in zip(shape.groups, counts, strict=True)
        ]
        self.group_of = [0] * shape.num_layers
        """For each layer the index of its group."""
        layers: dict[int, LayerKV] = {}
        for index, group in enumerate(shape.groups):
            for place, layer in enumerate(group.layers):
                self.group_of[layer] = index
                layers[layer] = self.groups[index].part(place)
        self.layers = [layers[layer] for layer in range(shape.num_layers)]
        """Views of each layer's part."""

    @classmethod
    def of_one_layer(cls, shape: CacheShape, count: int) -> PagedKV:
        """``count`` blocks that all layers write to in turn, for sequences that one pass computes
        whole: no layer reads what an earlier one wrote."""
        one = cls(replace(shape, num_layers=1, windows=()), [count])
        one.layers *= shape.num_layers
        one.group_of *= shape.num_layers
        return one

    @staticmethod
    def slot_bytes(shape: CacheShape, layers: int | None = None) -> dict[str, int]:
        """Bytes of one token's keys and values in so many layers, or in all, by part."""
        heads = 2 * (shape.num_layers if layers is None else layers) * shape.num_kv_heads
        stored = _STORED_DTYPE.get(shape.kv_dtype, shape.dtype)
        parts = {"kv": heads * shape.head_dim * stored.itemsize}
        if shape.kv_dtype == "int8":
            parts["kv_scales"] = heads * torch.float32.itemsize
        return parts

    @staticmethod
    def required_bytes(shape: CacheShape, counts: Sequence[int]) -> dict[str, int]:
        """Bytes of such cells, by part; allocates nothing."""
        total: Counter[str] = Counter()
        for group, count in zip(shape.groups, counts, strict=True):
            slots = count * shape.block_size
            for part, size in PagedKV.slot_bytes(shape, len(group.layers)).items():
                total[part] += slots * size
        return dict(total)


def _cells(shape: CacheShape, layers: int, num_blocks: int) -> LayerKV:
    """The cells of so many layers: each tensor of a layer's, with a dimension before."""
    rows = (layers, num_blocks, shape.block_size, shape.num_kv_heads)
    stored = _STORED_DTYPE.get(shape.kv_dtype, shape.dtype)
    # Zeros, not empty: attention must never read a NaN from uninitialised memory.
    keys, values = (_zeros((*rows, shape.head_dim), stored, shape.device) for _ in range(2))
    if shape.kv_dtype != "int8":
        return LayerKV(keys, values)
    key_scales, value_scales = (_zeros(rows, torch.float32, shape.device) for _ in range(2))
    return LayerKV(keys, values, key_scales, value_scales)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return Arena().zeros(*shape, dtype=dtype)
