"""The memory of this process, as Linux counts it."""

from __future__ import annotations

import re
from pathlib import Path


def peak_resident_bytes() -> int | None:
    """The most resident memory since this process began; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
