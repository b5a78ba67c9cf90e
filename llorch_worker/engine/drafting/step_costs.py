"""What a step costs by the number of its rows, measured on this machine."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

SHARED_RATE: Final = 0.25
"""How much the newest step counts for steps of all sizes: a busy machine slows all down."""
NEAR_RATE: Final = 0.05
"""How much more it counts for steps of its own size. Far less, because steps of one size alone must
not change how they compare with the others."""
MOST_CHANGE: Final = math.log(2)
"""A step that waited for something else counts as at most twice as long."""
UNMEASURED: Final = {1: 1.0, 16: 2.0, 64: 5.0}
"""Until the warm-up: 16 rows take twice as long as one."""


class StepCosts:
    """Seconds by rows: linear between the sizes that the warm-up measures, and kept current."""

    def __init__(self, seconds: Mapping[int, float] = UNMEASURED) -> None:
        """``seconds``: of at least two sizes."""
        self._sizes = sorted(seconds)
        self._seconds = [seconds[size] for size in self._sizes]

    def of(self, rows: float) -> float:
        """Seconds that a step of ``rows`` takes."""
        sizes, seconds = self._sizes, self._seconds
        right = min(max(bisect_left(sizes, rows), 1), len(sizes) - 1)
        left = right - 1
        share = (rows - sizes[left]) / (sizes[right] - sizes[left])
        return max(seconds[left] + share * (seconds[right] - seconds[left]), 1e-9)

    def note(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` has taken this long."""
        change = math.log(seconds / self.of(rows))
        change = max(-MOST_CHANGE, min(MOST_CHANGE, change))
        for index, size in enumerate(self._sizes):
            near = max(0.0, 1 - abs(math.log2(size / rows)))
            self._seconds[index] *= math.exp(change * (SHARED_RATE + NEAR_RATE * near))
