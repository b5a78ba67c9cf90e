"""Figures as people read them."""

from __future__ import annotations

from llorch_worker.bench.report.readings import Better


def shown(value: float) -> str:
    """Four digits, and all those before the point: 12,345  99.12  0.01234."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = f"{value:.4g}"
    return digits if "e" not in digits else f"{value:.2e}"


def gain(ratio: float, better: Better) -> str:
    """``better`` or ``worse`` where the ratio says so by more than 10%, the least that counts."""
    if better is None or ratio <= 0:
        return ""
    forward = ratio if better == "higher" else 1 / ratio
    if forward > 1.1:
        return "better"
    return "worse" if forward < 1 / 1.1 else ""
