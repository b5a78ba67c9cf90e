"""What a page shows of a saved run: readings, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Better = Literal["higher", "lower"] | None
"""Which direction is a gain; None where neither is."""


@dataclass(frozen=True)
class Metric:
    """What is read: its name for people, its unit and which direction is better."""

    title: str
    unit: str
    better: Better = None
    wide: bool = False
    """Whether its values may lie orders of magnitude apart, so that an axis may be logarithmic."""


@dataclass(frozen=True)
class Place:
    """Where a value stands in a plot over the load's size: ``prompt tokens``, 128, ``8 sequences``.

    Values of the same ``series`` are joined by a line.
    """

    title: str
    x: float
    series: str


@dataclass(frozen=True)
class Reading:
    """One value of a run: the ``metric`` of a ``category`` (a number of sequences, a part, ...)."""

    metric: Metric
    category: str
    value: float
    place: Place | None = None


@dataclass(frozen=True)
class Run:
    """One saved run. Those of the same ``kind`` and ``load`` are set side by side."""

    path: Path
    kind: str
    load: str
    subject: str
    """What was measured: a model and its dtype, say."""
    origin: tuple[str, ...]
    """Command, machine, versions, threads and seed, a line each."""
    readings: tuple[Reading, ...]
    notes: tuple[str, ...]
    """What the run itself says that it could not measure."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """In the order in which they first come."""
        return tuple(dict.fromkeys(reading.metric for reading in self.readings))


class NotARun(Exception):
    """The file is no run that a page can show; says why in a few words."""
