"""Numbers and sizes in readable form."""

from __future__ import annotations


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
