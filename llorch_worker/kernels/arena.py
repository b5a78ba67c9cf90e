"""Memory in huge pages for weights and the KV cache. A step reads all of it, and small pages would
cause TLB misses and be slow to allocate."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

ALIGNMENT_BYTES = 64
"""A cache line, to which the kernels align their vectors."""
_CHUNK_BYTES = 256 * 1024 * 1024
"""Bytes mapped at a time; pages that are never written take no memory."""
_HUGE_PAGE_BYTES = 2 * 1024 * 1024


class Arena:
    """Allocates tensors side by side; a chunk is freed when all its tensors are gone.

    Separate pages for each tensor would waste half a huge page on average.
    """

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._free, self._end = 0, 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros, aligned to a cache line. Its pages take memory once they are written
        to. Its storage covers its own bytes only, so that sums over storages do not count a chunk's
        unused end."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if self._chunk is None or self._free + size > self._end:
            room = max(size, _CHUNK_BYTES)
            self._chunk, self._free = _chunk(room)
            self._end = self._free + room
        start = self._free
        self._free += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=start).view(shape)


def _chunk(size: int) -> tuple[mmap.mmap, int]:
    """Memory, and the offset in it at which ``size`` bytes start on a huge page."""
    # Private: shared mappings get no huge pages by this advice.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without huge pages refuses; small pages work too.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return memory, -address % _HUGE_PAGE_BYTES
