"""Memory for weights and the KV cache in huge pages: a step reads all of it, and small pages miss
the TLB and take long to get."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

ALIGNMENT_BYTES = 64
"""A cache line, where the kernels' loads want vectors to begin."""
_CHUNK_BYTES = 256 * 1024 * 1024
"""Asked of the system at a time; what is never written takes no memory."""
_HUGE_PAGE_BYTES = 2 * 1024 * 1024


class Arena:
    """Hands out memory side by side, as tensors, and gives it back once all of a chunk are gone.

    Side by side, because each tensor in pages of its own would waste a huge page's half.
    """

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._free, self._end = 0, 0

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that begins at a cache line. Its storage is its own bytes only,
        so that who adds storages up does not count a chunk's unused end."""
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
    """Memory, and where in it ``size`` bytes begin at a huge page."""
    # Private: what may be shared with a child gets no huge pages by this advice.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without them refuses: small pages do the same, more slowly.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return memory, -address % _HUGE_PAGE_BYTES
