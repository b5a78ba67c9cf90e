"""How measurements are spread: percentiles of durations, and how far passes lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

from pydantic import BaseModel, ConfigDict


class Percentiles(BaseModel):
    """In milliseconds, interpolated between samples."""

    model_config = ConfigDict(frozen=True)

    p50: float
    p95: float
    p99: float
    samples: int

    @property
    def in_order(self) -> tuple[float, float, float]:
        return (self.p50, self.p95, self.p99)


def percentiles_ms(durations_s: Sequence[float]) -> Percentiles:
    """Of one duration at least."""
    # The function wants two at least.
    two_or_more = [*durations_s, *durations_s] if len(durations_s) == 1 else durations_s
    cuts = [1e3 * cut for cut in quantiles(two_or_more, n=100, method="inclusive")]
    return Percentiles(p50=cuts[49], p95=cuts[94], p99=cuts[98], samples=len(durations_s))


def spread_of(passes: Sequence[float]) -> float | None:
    """Largest less smallest, as a share of the median; None for one pass, which shows none."""
    if len(passes) < 2:
        return None
    return (max(passes) - min(passes)) / median(passes)
