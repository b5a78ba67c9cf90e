"""How glibc's malloc shares memory among a worker's threads."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_M_ARENA_MAX: Final = -8
"""From glibc's ``malloc.h``."""


def use_one_arena() -> None:
    """Let all threads that start from now on allocate from one arena.

    By default glibc gives threads arenas of their own, and what a thread frees stays in its arena.
    A worker of TinyLlama held 56 MiB more when it was ready. ``MALLOC_ARENA_MAX`` decides if it is
    set. Another C library is left alone.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
