"""A model file mapped into memory, read a piece at a time and dropped behind the reader."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llorch_worker.contract import ModelLoadFailed

Bytes = npt.NDArray[np.uint8]

_DROP_BYTES = 2 * 1024 * 1024
"""Consumed pages are handed back in runs of about this size."""
_BYTES_WORTH_A_THREAD = 512 * 1024
"""A thread that reads less costs more than it saves."""


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

    def each_chunk(
        self,
        start: int,
        rows: int,
        row_bytes: int,
        rows_per_chunk: int,
        take: Callable[[int, Bytes], None],
        threads: int = 1,
    ) -> None:
        """Call ``take`` with the rows from byte ``start`` on, in pieces: (first row, bytes).

        Each piece is [its rows, row_bytes] and valid during its call: the pages behind it are
        dropped, so that a load holds the model and a few megabytes, not the model and its file.
        With more than one thread pieces come in no order, to several calls at a time.
        """

        def read(first: int, end: int) -> None:
            dropped = offset = start + first * row_bytes
            for row in range(first, end, rows_per_chunk):
                count = min(rows_per_chunk, end - row)
                piece = np.frombuffer(self._map, np.uint8, count * row_bytes, offset)
                take(row, piece.reshape(count, row_bytes))
                offset += count * row_bytes
                if offset - dropped >= _DROP_BYTES:
                    self._drop(dropped, offset)
                    dropped = offset
            self._drop(dropped, offset)

        threads = min(threads, rows * row_bytes // _BYTES_WORTH_A_THREAD)
        if threads <= 1:
            read(0, rows)
            return
        chunks = -(-rows // rows_per_chunk)
        borders = [min(rows, chunks * i // threads * rows_per_chunk) for i in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            # list() raises what a thread raised.
            list(pool.map(read, borders[:-1], borders[1:]))

    def _drop(self, start: int, end: int) -> None:
        # Pages shared with a neighbour go too: they are clean, and read again when needed.
        first = start - start % mmap.PAGESIZE
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
