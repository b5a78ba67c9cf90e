"""The buffers of recorded decode steps, at fixed addresses."""

from __future__ import annotations

import torch

from llorch_worker.cache.shape import CacheShape


class DecodeBuffers:
    """Inputs and logits of up to ``shape.decode_rows`` decoding sequences.

    A row without a sequence is blank: it decodes token 0 at position 0 of ``scratch_block``, which
    no sequence holds, and its logits are never read.
    """

    def __init__(self, shape: CacheShape, *, scratch_block: int) -> None:
        def numbers(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=torch.int64, device=shape.device)

        self.rows = rows = shape.decode_rows
        self.token_ids = numbers(rows)
        self.positions = numbers(rows)
        self.slots = numbers(rows)
        self.contexts = numbers(rows)
        self.logits_rows = torch.arange(rows, device=shape.device)
        self.block_tables = numbers(rows, shape.context_blocks)
        self.logits = torch.zeros(rows, shape.vocab_size, device=shape.device)
        self._scratch_block = scratch_block
        self._scratch_slot = scratch_block * shape.block_size
        self.blank(0, rows)

    def blank(self, first: int, end: int) -> None:
        """Makes rows ``first`` to ``end - 1`` blank."""
        rows = slice(first, end)
        self.token_ids[rows] = 0
        self.positions[rows] = 0
        self.slots[rows] = self._scratch_slot
        self.contexts[rows] = 1
        self.block_tables[rows] = self._scratch_block

    @staticmethod
    def required_bytes(shape: CacheShape) -> int:
        """Bytes of such buffers; allocates nothing."""
        numbers = (5 + shape.context_blocks) * torch.int64.itemsize
        return shape.decode_rows * (numbers + shape.vocab_size * torch.float32.itemsize)

    @property
    def nbytes(self) -> int:
        numbers = (self.token_ids, self.positions, self.slots, self.contexts, self.logits_rows)
        return sum(t.nbytes for t in (*numbers, self.block_tables, self.logits))
