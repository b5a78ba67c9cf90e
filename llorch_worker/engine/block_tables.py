"""The block tables of running sequences, which stay on the device."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch

from llorch_worker.cache import WindowPool
from llorch_worker.engine.sequence import Sequence, SequenceState

Integers = npt.NDArray[np.int64]

_ALIGNED_COLUMNS = 4
"""Kernels load 16 bytes at once: each row begins at a multiple of them."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What a step changes in the tables before it reads them."""

    shape: tuple[int, int]
    """Rows and columns of the tables from then on."""
    anew: bool
    """Whether nothing in them is kept."""
    cells: Integers
    """[changed] indices into a table's cells, row by row."""
    blocks: tuple[npt.NDArray[np.int32], ...]
    """Their blocks in each group of layers, [changed]."""
    rows: Integers | slice
    """Those of the step's sequences, in their order."""


class BlockTables:
    """A row for each running sequence. A step sends only the cells that have changed.

    The engine thread calls :meth:`lay_out` at the launch and :meth:`update` as part of the step, in
    the same order.
    """

    def __init__(self, windows: Items[WindowPool], device: torch.device) -> None:
        self._windows = windows
        self._device = device
        self._rows: dict[Sequence, int] = {}
        self._free: list[int] = []
        self._shape = (0, 0)
        self._anew = True
        self._tables: list[torch.Tensor] = []

    def forget(self) -> None:
        """Lays out everything anew at the next step: after a failed step, or when idle."""
        self._rows.clear()
        self._free.clear()
        self._shape, self._anew = (0, 0), True

    def lay_out(self, sequences: Items[Sequence]) -> TableChanges:
        """What has changed for ``sequences`` since they were last in a step. Only running sequences
        keep their rows."""
        if len(self._rows) != len(sequences) or None in map(self._rows.get, sequences):
            self._assign(sequences)
        changed = [s for s in sequences if s.laid_blocks < len(s.blocks)]
        columns = self._shape[1]
        if changed and (widest := max(len(s.blocks) for s in changed)) > columns:
            columns = -(-(widest + widest // 8) // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS
        self._shape = (max(self._shape[0], len(self._rows) + len(self._free)), columns)
        cells, blocks = array("q"), array("q")
        for sequence in changed:
            first, end = sequence.laid_blocks, len(sequence.blocks)
            row = self._rows[sequence] * columns
            cells.extend(range(row + first, row + end))
            blocks.extend(sequence.blocks[first:])
            sequence.laid_blocks = end
        new = np.array(blocks)
        rows = [*map(self._rows.__getitem__, sequences)]
        in_order = rows == list(range(rows[0], rows[0] + len(rows)))
        anew, self._anew = self._anew, False
        return TableChanges(
            shape=self._shape,
            anew=anew,
            cells=np.array(cells),
            blocks=tuple(
                each.astype(np.int32)
                for each in (new, *(window.partners[new] for window in self._windows))
            ),
            rows=slice(rows[0], rows[0] + len(rows)) if in_order else np.array(rows),
        )

    def rows_of(self, sequences: Items[Sequence]) -> list[int]:
        """The row of each sequence, or one behind them all. A step that takes them in this order
        need not copy its tables."""
        return [*map(self._rows.get, sequences, repeat(len(self._rows)))]

    def update(
        self,
        changes: TableChanges,
        cells: torch.Tensor,
        blocks: Items[torch.Tensor],
        rows: torch.Tensor | None,
    ) -> Iterator[torch.Tensor]:
        """Applies ``changes``, whose arrays are on the device now, and gives the table of each
        group, [sequences, columns] int32. Behind a sequence's blocks there are any."""
        if changes.anew:
            self._tables = [torch.empty(0, 0, dtype=torch.int32, device=self._device)] * len(blocks)
        if self._tables[0].shape != changes.shape:
            self._tables = [_grown(table, changes.shape) for table in self._tables]
        for table, new in zip(self._tables, blocks, strict=True):
            if len(cells):
                table.view(-1).index_copy_(0, cells, new)
            if rows is not None:
                yield table.index_select(0, rows)
            else:
                assert isinstance(changes.rows, slice)
                yield table[changes.rows]

    def _assign(self, sequences: Items[Sequence]) -> None:
        """Gives rows to those that have none, and leaves no gap between those in use."""
        for sequence in [s for s in self._rows if s.state is not SequenceState.RUNNING]:
            heapq.heappush(self._free, self._rows.pop(sequence))
        for sequence in sequences:
            if sequence not in self._rows:
                self._move(sequence)
        used = len(self._rows)
        for sequence in [s for s, row in self._rows.items() if row >= used]:
            heapq.heappush(self._free, self._rows.pop(sequence))
            self._move(sequence)

    def _move(self, sequence: Sequence) -> None:
        """Gives the sequence the first free row."""
        total = len(self._rows) + len(self._free)
        self._rows[sequence] = heapq.heappop(self._free) if self._free else total
        sequence.laid_blocks = 0


def _grown(table: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    grown = torch.zeros(shape, dtype=table.dtype, device=table.device)
    grown[: table.shape[0], : table.shape[1]] = table
    return grown
