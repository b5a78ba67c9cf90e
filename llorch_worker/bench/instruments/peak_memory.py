"""The most memory that this process has held."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

_HIGH_WATER = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_resident_bytes() -> int | None:
    """Of the machine's own memory; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return _peak_by_getrusage()
    found = _HIGH_WATER.search(status)
    return int(found[1]) * 1024 if found else None


def peak_device_bytes(device: torch.device) -> int | None:
    """Of a card's memory, as torch allocated it; None for the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _peak_by_getrusage() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
