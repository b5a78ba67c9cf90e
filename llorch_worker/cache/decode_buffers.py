"""The buffers of recorded decode steps, at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llorch_worker.cache.kv import Places
from llorch_worker.cache.shape import CacheShape


class DecodeBuffers:
    """Inputs and logits of up to ``shape.decode_rows`` decoding sequences.

    A row without a sequence is blank: it decodes token 0 at position 0 of the scratch block of each
    group of layers, which no sequence holds, and its logits are never read.
    """

    def __init__(self, shape: CacheShape, *, scratch_blocks: Sequence[int]) -> None:
        def numbers(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=shape.device)

        self.rows = rows = shape.decode_rows
        self.token_ids = numbers(rows)
        self.positions = numbers(rows)
        self.contexts = numbers(rows)
        self.logits_rows = torch.arange(rows, device=shape.device)
        self.places = tuple(
            Places(numbers(rows, shape.context_blocks, dtype=torch.int32), numbers(rows))
            for _ in shape.groups
        )
        """Of each group."""
        self.logits = torch.zeros(rows, shape.vocab_size, device=shape.device)
        self._scratch_blocks = scratch_blocks
        self._block_size = shape.block_size
        self.blank(0, rows)

    def blank(self, first: int, end: int) -> None:
        """Makes rows ``first`` to ``end - 1`` blank."""
        rows = slice(first, end)
        self.token_ids[rows] = 0
        self.positions[rows] = 0
        self.contexts[rows] = 1
        for places, scratch in zip(self.places, self._scratch_blocks, strict=True):
            places.block_tables[rows] = scratch
            places.slots[rows] = scratch * self._block_size

    @staticmethod
    def required_bytes(shape: CacheShape) -> int:
        """Bytes of such buffers; allocates nothing."""
        numbers = (4 + len(shape.groups)) * torch.int64.itemsize
        numbers += len(shape.groups) * shape.context_blocks * torch.int32.itemsize
        return shape.decode_rows * (numbers + shape.vocab_size * torch.float32.itemsize)
