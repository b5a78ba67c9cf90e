"""Numbers, sizes and times in readable form."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal


def counted(count: int, noun: str) -> str:
    """``1 letter``, ``2 letters``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def human_bytes(count: float) -> str:
    """``count`` bytes in binary units: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_count(count: float) -> str:
    """``count`` in decimal units: ``6.74 B`` for 6,738,415,616 parameters."""
    for unit in ("", " K", " M"):
        if abs(count) < 1000:
            return f"{count:.0f}" if unit == "" else f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} B"


def human_time(seconds: float) -> str:
    """A time in its largest whole unit: ``12 s``, ``5 min``, ``3 h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def iso_time(unix_s: float, precision: Literal["seconds", "milliseconds"] = "milliseconds") -> str:
    """A Unix time in UTC, as ISO 8601 writes it."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec=precision)


def human_ms(milliseconds: float) -> str:
    """A duration: ``850 ms``, ``1.2 s``, ``5 min``."""
    if milliseconds < 1e3:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1e3
    return f"{seconds:.1f} s" if seconds < 10 else human_time(seconds)
