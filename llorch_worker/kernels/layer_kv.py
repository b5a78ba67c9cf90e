"""One layer's part of the KV cache, in any of the formats of ``KvDtype``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llorch_worker.engine_options import KvDtype

FP8_LARGEST = 448.0
"""The largest number of float8 e4m3 without infinities."""
INT8_LARGEST = 127.0
SMALLEST_AMPLITUDE = 1e-20
"""The lower bound, so that the scale of a row of zeros is not 0."""


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer: [blocks, block_size, kv_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    """[blocks, block_size, kv_heads] float32 if keys are int8."""
    value_scales: torch.Tensor | None = None

    def part(self, layer: int) -> LayerKV:
        """A view of one layer, if this has the cells of several: with a dimension before."""
        keys, values = self.keys[layer], self.values[layer]
        if self.key_scales is None or self.value_scales is None:
            return LayerKV(keys, values)
        return LayerKV(keys, values, self.key_scales[layer], self.value_scales[layer])

    @property
    def kv_dtype(self) -> KvDtype:
        if self.key_scales is not None:
            return "int8"
        return "fp8" if self.keys.dtype is torch.float8_e4m3fn else "auto"

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``k``, ``v``: [tokens, kv_heads, head_dim] at ``slots``: [tokens] int64."""
        _write(self.keys, self.key_scales, slots, k)
        _write(self.values, self.value_scales, slots, v)

    def gather(self, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values at ``slots: [n]``: [n, kv_heads, head_dim] of ``dtype``."""
        return (
            _gather(self.keys, self.key_scales, slots, dtype),
            _gather(self.values, self.value_scales, slots, dtype),
        )


def _write(
    cells: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, rows: torch.Tensor
) -> None:
    cells = cells.flatten(0, 1)
    if scales is not None:
        wide = rows.float()
        scale = wide.abs().amax(-1).clamp_(min=SMALLEST_AMPLITUDE) / INT8_LARGEST
        scales.flatten(0, 1).index_copy_(0, slots, scale)
        codes = (wide / scale.unsqueeze(-1)).add_(0.5).floor_()  # rounds half up
        cells.index_copy_(0, slots, codes.to(torch.int8))
    elif cells.dtype is torch.float8_e4m3fn:
        # Viewed as bytes, because torch cannot copy float8 by index on the CPU.
        narrow = rows.float().clamp_(-FP8_LARGEST, FP8_LARGEST).to(cells.dtype)
        cells.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))
    else:
        cells.index_copy_(0, slots, rows)


def _gather(
    cells: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    cells = cells.flatten(0, 1)
    if scales is not None:
        scale = scales.flatten(0, 1).index_select(0, slots).unsqueeze(-1)
        return (cells.index_select(0, slots).float() * scale).to(dtype)
    if cells.dtype is torch.float8_e4m3fn:
        chosen = cells.view(torch.uint8).index_select(0, slots)
        return chosen.view(torch.float8_e4m3fn).to(dtype)
    return cells.index_select(0, slots)
