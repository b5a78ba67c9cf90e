"""A model file on disk: the header is mapped, tensors come in large reads, a piece at a time."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model_files.side_file import open_regular

Bytes = npt.NDArray[np.uint8]

CHUNK_ELEMENTS = 32 * 1024 - 1
"""Elements unpacked at a time. Temporaries stay in the CPU caches, and torch leaves the work to the
thread that reads, because it starts threads only from 32,768 elements on."""
_READ_BYTES = 4 * 1024 * 1024
"""Bytes read at a time. Reading a cold file through a mapping would fault it in page by page."""
_BYTES_WORTH_A_THREAD = 512 * 1024
"""Reading fewer bytes does not pay for starting a thread."""


class ModelFile:
    """One file, read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.size_bytes = os.fstat(self._descriptor).st_size
        if self.size_bytes == 0:
            raise ModelLoadFailed(f"{path} is empty; download or convert the model again.")
        try:
            self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadFailed(
                f"{path} cannot be mapped ({error.strerror}); check its file system."
            ) from error

    def read(self, start: int, length: int) -> bytes:
        """A copy of ``length`` bytes; shorter at the end of the file."""
        return self._map[start : start + length]

    def read_at(self, start: int, length: int) -> bytes:
        """:meth:`read` without the mapping, which would read ahead and keep its pages."""
        return os.pread(self._descriptor, length, start)

    def each_chunk(
        self,
        start: int,
        rows: int,
        row_bytes: int,
        rows_per_chunk: int,
        take: Callable[[int, Bytes], None],
        threads: int = 1,
    ) -> None:
        """Call ``take`` with (first row, bytes) for each piece of the rows from byte ``start`` on.

        A piece is [its rows, row_bytes] and valid during the call only, so that a load holds the
        model and a few megabytes of its file. With several threads, pieces come in any order and
        several at once.
        """
        rows_per_read = max(1, _READ_BYTES // (rows_per_chunk * row_bytes)) * rows_per_chunk

        def read(first: int, end: int) -> None:
            buffer = np.empty(min(rows_per_read, end - first) * row_bytes, np.uint8)
            for at in range(first, end, rows_per_read):
                rows_here = min(rows_per_read, end - at)
                piece = buffer[: rows_here * row_bytes]
                self.fill(piece, start + at * row_bytes)
                for row in range(0, rows_here, rows_per_chunk):
                    chunk = piece[row * row_bytes : (row + rows_per_chunk) * row_bytes]
                    take(at + row, chunk.reshape(-1, row_bytes))

        threads = min(threads, rows * row_bytes // _BYTES_WORTH_A_THREAD)
        if threads <= 1:
            read(0, rows)
            return
        chunks = -(-rows // rows_per_chunk)
        borders = [min(rows, chunks * i // threads * rows_per_chunk) for i in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            # list() raises the errors of the threads.
            list(pool.map(read, borders[:-1], borders[1:]))

    def fill(self, out: Bytes, offset: int) -> None:
        """Read ``out`` from byte ``offset`` on, and ask the disk to read ahead."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            # Advice only; some file systems refuse it.
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, offset, 4 * len(out), os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._descriptor, [out[done:].data], offset + done)
            except OSError as error:
                raise ModelLoadFailed(
                    f"{self.path} cannot be read ({error.strerror}); check the disk."
                ) from error
            if count == 0:
                raise ModelLoadFailed(f"{self.path} shrank while it was being read; load it again.")
            done += count
