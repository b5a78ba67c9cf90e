"""A model file mapped into memory, read a piece at a time and dropped behind the reader."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llorch_worker.contract import ModelLoadFailed

_DROP_BYTES = 2 * 1024 * 1024
"""Consumed pages are handed back in runs of about this size."""


class MappedFile:
    """Read-only view of one file; pages leave the process's resident memory once consumed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size_bytes = file.seek(0, 2)
                if self.size_bytes == 0:
                    raise ModelLoadFailed(f"{path} is empty; download or convert the model again.")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadFailed(
                f"{path} cannot be read ({error.strerror}); check the path and its permissions."
            ) from error

    def read(self, start: int, length: int) -> bytes:
        """A copy of ``length`` bytes; shorter where the file ends before."""
        return self._map[start : start + length]

    def chunks(
        self, start: int, rows: int, row_bytes: int, rows_per_chunk: int
    ) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """The ``rows`` rows from byte ``start`` on, as pieces (first row, bytes [rows, row_bytes]).

        Each piece is valid until the next is asked for: the pages behind it are dropped, so that a
        load holds the model and a few megabytes, not the model and its file.
        """
        dropped = start
        for row in range(0, rows, rows_per_chunk):
            count = min(rows_per_chunk, rows - row)
            offset = start + row * row_bytes
            piece = np.frombuffer(self._map, np.uint8, count * row_bytes, offset)
            yield row, piece.reshape(count, row_bytes)
            end = offset + count * row_bytes
            if end - dropped >= _DROP_BYTES:
                self._drop(dropped, end)
                dropped = end
        self._drop(dropped, start + rows * row_bytes)

    def _drop(self, start: int, end: int) -> None:
        # Pages shared with a neighbour go too: they are clean, and read again when needed.
        first = start - start % mmap.PAGESIZE
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
