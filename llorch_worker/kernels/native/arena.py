"""Memory for weights in huge pages: a step reads all of it, and small pages miss the TLB."""

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
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that begins at a cache line."""
        size = math.prod(shape) * dtype.itemsize
        start = -(-self._used_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if start + size > len(self._chunk):
            self._chunk = _chunk(max(size, _CHUNK_BYTES))
            start = 0
        self._used_bytes = start + size
        return self._chunk[start : start + size].view(dtype).view(shape)


def _chunk(size: int) -> torch.Tensor:
    """[size] uint8 that begins at a huge page."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without them refuses: small pages do the same, more slowly.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    start = -chunk.data_ptr() % _HUGE_PAGE_BYTES
    return chunk[start : start + size]
