"""The memory of a process, as Linux counts it."""

from __future__ import annotations

import re
from pathlib import Path


def peak_resident_bytes(pid: int | None = None) -> int | None:
    """The most resident memory since the process began, loading included; None where the system
    does not say. ``pid``: None for this process."""
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
