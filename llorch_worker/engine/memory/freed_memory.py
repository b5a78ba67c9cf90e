"""Memory that was freed, and that the C library keeps for later."""

from __future__ import annotations

import ctypes
import platform


def return_freed_memory() -> None:
    """Return freed memory to the system. Only glibc keeps much of it and can return it.

    The tensors of a step lie between others when they are freed, so glibc keeps more than a step
    ever needs at once. Other threads that allocate wait meanwhile, for a few ms.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
