"""The rows of the table: our figures beside a peer's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal, Self

from benches.peers.contestants.contestant import BatchKind
from llorch_worker.bench.instruments.percentiles import spread_of
from llorch_worker.bench.instruments.provenance import Frozen


class Side(Frozen):
    """The figures of one side, ours or the peer's."""

    tokens_per_s: float
    """Median over the passes."""
    spread: float | None
    """Largest minus smallest of the passes, as a share of the median; None for one pass."""
    note: str = ""

    @classmethod
    def of(cls, tokens_per_s: Sequence[float], note: str = "") -> Self:
        """``tokens_per_s`` of each pass."""
        return cls(tokens_per_s=median(tokens_per_s), spread=spread_of(tokens_per_s), note=note)


class BatchRow(Frozen):
    """A prefill, or the decoding of this many sequences."""

    kind: BatchKind
    peer: str
    sequences: int
    prompt_tokens: int
    ours: Side
    theirs: Side
    ratio: float
    """Our tokens per second divided by the peer's: median over the pairs of passes."""


class JobsRow(Frozen):
    """Jobs of mixed lengths, all submitted at once; only generated tokens count."""

    kind: Literal["jobs"] = "jobs"
    peer: str
    jobs: int
    ours: Side
    theirs: Side
    our_jobs_per_s: float
    their_jobs_per_s: float
    ratio: float


class Skipped(Frozen):
    """Something that was not measured, and why."""

    kind: Literal["skipped"] = "skipped"
    peer: str
    what: str
    reason: str
