"""A histogram for the engine's thread, which has no time for locks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString


class Tally:
    """Counts of values by bucket. One thread adds, any thread reads.

    A reader may see the sum without the value that is just being added.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: the largest value of each bucket but the last, which has none; ascending."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(tuple(self._counts))

    def buckets(self) -> list[tuple[str, int]]:
        """Each bound as Prometheus writes it, with the number of values up to it."""
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        return list(zip(bounds, accumulate(tuple(self._counts)), strict=True))
