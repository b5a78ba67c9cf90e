"""The rows of ``llorch bench peers``: ours beside a peer's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from benches.peers.contestants.contestant import BatchKind
from llorch_worker.bench.instruments.percentiles import spread_of


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Side(_Frozen):
    """Ours or theirs."""

    tokens_per_s: float
    """Median of the passes."""
    spread: float | None
    """Largest less smallest of the passes, as a share of the median; None for one pass."""
    note: str = ""

    @classmethod
    def of(cls, tokens_per_s: Sequence[float], note: str = "") -> Self:
        """``tokens_per_s`` of each pass."""
        return cls(tokens_per_s=median(tokens_per_s), spread=spread_of(tokens_per_s), note=note)


class BatchRow(_Frozen):
    """A prefill, or the decoding of so many sequences."""

    kind: BatchKind
    peer: str
    sequences: int
    prompt_tokens: int
    ours: Side
    theirs: Side
    ratio: float
    """Our tokens a second against theirs: median over the pairs of passes."""


class JobsRow(_Frozen):
    """Jobs of mixed lengths, all submitted at once; tokens are generated ones."""

    kind: Literal["jobs"] = "jobs"
    peer: str
    jobs: int
    ours: Side
    theirs: Side
    our_jobs_per_s: float
    their_jobs_per_s: float
    ratio: float


class Skipped(_Frozen):
    """What was not measured, and why."""

    kind: Literal["skipped"] = "skipped"
    peer: str
    what: str
    reason: str
