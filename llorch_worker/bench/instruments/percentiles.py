"""Percentiles of durations, and the spread of passes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from llorch_worker.bench.instruments.provenance import Frozen


class Percentiles(Frozen):
    """In milliseconds, interpolated between samples."""

    p50: float
    p95: float
    p99: float
    samples: int


def percentiles_ms(durations_s: Sequence[float]) -> Percentiles:
    """``durations_s`` holds at least one duration."""
    # `quantiles` needs two values.
    two_or_more = [*durations_s, *durations_s] if len(durations_s) == 1 else durations_s
    cuts = [1e3 * cut for cut in quantiles(two_or_more, n=100, method="inclusive")]
    return Percentiles(p50=cuts[49], p95=cuts[94], p99=cuts[98], samples=len(durations_s))


def spread_of(passes: Sequence[float]) -> float | None:
    """Largest minus smallest, as a share of the median; None for a single pass."""
    return None if len(passes) < 2 else (max(passes) - min(passes)) / median(passes)
