"""What jobs that ended lately took, as counts that add up over workers.

Percentiles of several workers cannot be added; counts of durations by bucket can. Four buckets a
doubling keep a percentile within 10% of the true one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

WINDOW_S = 300
"""How long a job counts as recent."""
BUCKETS_A_DOUBLING = 4
SHORTEST_MS = 0.1

Durations = dict[Annotated[int, Field(ge=-100, le=200)], Annotated[int, Field(ge=0)]]
"""Bucket -> how many durations fell into it."""
_DURATIONS = ("queue_ms", "first_token_ms", "e2e_ms")
"""The fields of this type."""


class RecentJobs(BaseModel):
    """The jobs of the last :data:`WINDOW_S`, or the last thousands, of one worker or more."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    ended: int = 0
    """How many ended with a result or an error; cancelled ones are not counted."""
    failed: int = 0
    """How many of them ended with an error."""
    jobs_per_min: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """How many tokens of the prompts were found in the KV cache."""
    completion_tokens: int = 0
    accepted_draft_tokens: int = 0
    """How many tokens of the texts the workers had guessed."""
    queue_ms: Durations = {}
    first_token_ms: Durations = {}
    """From the enqueueing, as is ``e2e_ms``."""
    e2e_ms: Durations = {}

    @property
    def cache_hits(self) -> float | None:
        """The share of the prompts' tokens found in the KV cache; None without prompts."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def draft_hits(self) -> float | None:
        """The share of the texts' tokens that were guessed; None if none was."""
        drafted = self.accepted_draft_tokens
        return drafted / max(drafted, self.completion_tokens) if drafted else None

    def document(self) -> dict[str, Any]:
        """For scripts: percentiles instead of buckets."""
        durations = {name: getattr(self, name) for name in _DURATIONS}
        return self.model_dump(exclude={*_DURATIONS}) | {
            name: {"p50": percentile_ms(found, 0.5), "p95": percentile_ms(found, 0.95)}
            for name, found in durations.items()
        }


def total(parts: Iterable[RecentJobs]) -> RecentJobs:
    """All ``parts`` together."""
    amounts: Counter[str] = Counter()
    durations: dict[str, Counter[int]] = {name: Counter() for name in _DURATIONS}
    for part in parts:
        amounts.update(part.model_dump(exclude={*_DURATIONS}))
        for name, counts in durations.items():
            counts.update(getattr(part, name))
    return RecentJobs(**amounts, **durations)


def by_bucket(durations_ms: Iterable[float]) -> Durations:
    """Counts each duration in its bucket: bucket ``i`` begins at ``2 ** (i / 4)`` ms."""
    return dict(
        Counter(
            math.floor(BUCKETS_A_DOUBLING * math.log2(max(duration_ms, SHORTEST_MS)))
            for duration_ms in durations_ms
        )
    )


def percentile_ms(durations: Mapping[int, int], share: float) -> float | None:
    """The duration that ``share`` of the jobs did not exceed; None without jobs."""
    left = share * sum(durations.values())
    for bucket in sorted(durations):
        if left <= durations[bucket]:
            # As if the bucket's durations lay evenly over its logarithmic width.
            position = bucket + left / durations[bucket]
            return float(2 ** (position / BUCKETS_A_DOUBLING))
        left -= durations[bucket]
    return None
