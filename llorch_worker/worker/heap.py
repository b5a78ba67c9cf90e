"""Python's own memory, once a worker has what it keeps."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HUGE_PAGE_BYTES = 2 * 2**20
MADV_COLLAPSE = 25
"""Of Linux 6.1 and later, from its <linux/mman.h>; Python has no name for it."""
LEAST_USED = 0.75
"""The share of a mapping that must be in use already: all of it is afterwards."""
LARGEST_BYTES = 128 * 2**20
"""What is larger is no heap of Python's. Weights and KV cache see to themselves."""
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def freeze_heap() -> None:
    """Takes what there is out of the garbage collector's sight, for good.

    To look through all of torch and Celery takes it a tenth of a second, in which every job waits.
    """
    gc.collect()
    gc.freeze()


def collapse_heap() -> None:
    """Moves what Python has allocated into huge pages.

    A step of a model leaves nothing of Python in the processor's caches. The code that follows
    misses the TLB at every page of 4 KiB, and the page's entry must come from memory too. Does
    nothing where the kernel cannot, its operator says never, or the mappings cannot be read.
    """
    # Here, because a producer imports the worker's modules without what the worker needs.
    import psutil

    try:
        if "[never]" in _SWITCH.read_text():
            return
        heaps = list(_heaps(psutil.Process().memory_maps(grouped=False)))
    except (OSError, psutil.Error, AttributeError):
        # psutil has no memory_maps where the system has none.
        return
    libc = ctypes.CDLL(None)
    for start, end in heaps:
        first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        size = (end - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if size > 0:
            # What is refused (an older kernel, no memory in pieces so large) stays as it is.
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_COLLAPSE)


def _heaps(mappings: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """The private anonymous ones that are mostly in use: first byte and end."""
    for mapping in mappings:
        if mapping.path not in ("[anon]", "[heap]") or not mapping.perms.startswith("rw-p"):
            continue
        if mapping.size <= LARGEST_BYTES and mapping.rss >= LEAST_USED * mapping.size:
            start, _, end = mapping.addr.partition("-")
            yield int(start, 16), int(end, 16)
