"""What a recorded decode step reads and writes: always at the same addresses."""

from __future__ import annotations

import torch


class DecodeBuffers:
    """Inputs and logits of ``rows`` decoding sequences.

    A row that no sequence has is blank: it decodes token 0 at position 0 of a scratch block, which
    belongs to nobody, and its logits are nobody's.
    """

    def __init__(
        self,
        *,
        rows: int,
        table_width: int,
        vocab_size: int,
        scratch_block: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.rows = rows
        self.token_ids = numbers(rows)
        self.positions = numbers(rows)
        self.slots = numbers(rows)
        self.contexts = numbers(rows)
        self.logits_rows = torch.arange(rows, device=device)
        self.block_tables = numbers(rows, table_width)
        self.logits = torch.zeros(rows, vocab_size, device=device)
        self._scratch_block = scratch_block
        self._scratch_slot = scratch_block * block_size
        self.blank(0, rows)

    def blank(self, first: int, end: int) -> None:
        """Make rows ``first`` to ``end - 1`` blank."""
        rows = slice(first, end)
        self.token_ids[rows] = 0
        self.positions[rows] = 0
        self.slots[rows] = self._scratch_slot
        self.contexts[rows] = 1
        self.block_tables[rows] = self._scratch_block

    @staticmethod
    def required_bytes(*, rows: int, table_width: int, vocab_size: int) -> int:
        """What such buffers take; allocates nothing."""
        numbers = rows * (5 + table_width) * torch.int64.itemsize
        return numbers + rows * vocab_size * torch.float32.itemsize

    @property
    def nbytes(self) -> int:
        numbers = (self.token_ids, self.positions, self.slots, self.contexts, self.logits_rows)
        return sum(t.nbytes for t in (*numbers, self.block_tables, self.logits))
