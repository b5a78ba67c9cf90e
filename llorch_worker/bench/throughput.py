"""How many jobs and tokens a second: of whoever runs jobs, and whoever asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """Jobs that were submitted at once, from the submission to the last result."""

    jobs: int
    tokens: int
    """Generated ones."""
    wall_s: float

    @property
    def jobs_per_s(self) -> float:
        return self.jobs / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s
