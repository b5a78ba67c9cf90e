"""The ledger: what was sent and what was seen, kept by the harness outside the broker."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLAIN, CANCELLED, POISON, STOCK = "plain", "cancelled", "poison", "stock"
"""What a job promises. A plain one succeeds. A cancelled one succeeds or is revoked: a cancel may
come late. A poison one kills its engines and fails. A stock one runs once, in stock Celery."""


@dataclass(frozen=True)
class Job:
    """One job as sent: ``seed`` determines its tokens, and ``tokens`` is their number."""

    id: str
    seed: int
    tokens: int
    sent_s: float = 0.0
    kind: str = PLAIN
    due_s: float = 0.0
    """It must not start before."""
    is_low: bool = False
    """Whether more urgent jobs go before it, for a minute at most."""
    after: tuple[str, ...] = ()
    """The first job of its chain, or the parts of the chord whose body it is."""


@dataclass(frozen=True)
class Reply:
    """A worker's reply to a control command; ``refused``: whether the command must be refused."""

    command: str
    refused: bool
    reply: Any


@dataclass(frozen=True)
class Entry:
    """One stream entry, and when it was first seen."""

    id: str
    seen_s: float
    document: str


@dataclass(frozen=True)
class Result:
    """The result backend's document from ``seen_s`` on."""

    seen_s: float
    document: str


@dataclass(frozen=True)
class Kill:
    """One strike against a worker; ``held``: the jobs that it then held, with the number of stream
    entries of each.

    ``gone_s``: when the worker died or was cut off.
    """

    kind: str
    detail: str
    worker: str
    gone_s: float
    held: Mapping[str, int]


@dataclass
class Ledger:
    """Threads append to it and never remove. Times are seconds of one monotonic clock."""

    jobs: list[Job] = field(default_factory=list)
    """Each is noted before it is sent, because only jobs noted here can count as lost."""
    retries: Counter[str] = field(default_factory=Counter)
    """How often each job's dead letter was retried, so that it ends once more."""
    runs: Counter[str] = field(default_factory=Counter)
    """How often each stock task ran."""
    replies: list[Reply] = field(default_factory=list)
    entries: defaultdict[str, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    """By job, in the order in which readers saw them."""
    withdrawn: list[tuple[str, str]] = field(default_factory=list)
    """Jobs and entries that were seen before and have disappeared."""
    results: defaultdict[str, list[Result]] = field(default_factory=lambda: defaultdict(list))
    """By job, in the order in which they became visible."""
    kills: list[Kill] = field(default_factory=list)
    last_activity_s: float = 0.0
    """When a stream or a result last changed."""

    def entry(self, job_id: str, entry: Entry) -> None:
        """Notes a new stream entry."""
        self.entries[job_id].append(entry)
        self.last_activity_s = max(self.last_activity_s, entry.seen_s)

    def result(self, job_id: str, result: Result) -> None:
        """Notes a document in the result backend; repeats are ignored."""
        found = self.results[job_id]
        if not found or found[-1].document != result.document:
            found.append(result)
            self.last_activity_s = max(self.last_activity_s, result.seen_s)

    def save(self, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            json.dump(vars(self), file, default=vars)
