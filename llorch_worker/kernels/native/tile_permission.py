"""Linux' permission to use the tile registers of AMX."""

from __future__ import annotations

import ctypes
import os

# asm/prctl.h and asm/unistd_64.h
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def tile_refusal() -> str | None:
    """Ask for this process and its threads; the reason why Linux refuses, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return None
    # ENOSPC: a thread's stack for signals is too small for 8 KiB more of registers.
    reason = os.strerror(ctypes.get_errno())
    return f"Linux does not let this process use the tile registers of AMX: {reason}"
