"""The audit of a ledger: jobs and tokens that were lost, doubled, missing or wrong."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benches.battle.ledger import Entry, Job, Ledger, Result
from tests.toy_generation import token_id

SUCCESS = "SUCCESS"
TERMINAL_STATES = (SUCCESS, "FAILURE", "REVOKED")
TERMINAL_EVENTS = ("finished", "failed", "cancelled")


@dataclass
class StreamFindings:
    """What a live reader of a job's stream saw. Most counts are of tokens."""

    seen: int = 0
    doubled: int = 0
    missing: int = 0
    wrong: int = 0
    disordered: int = 0
    """Tokens seen after a later one."""
    runs_from_zero: int = 0
    """How often the first token was repeated."""
    ends: int = 0
    after_end: int = 0
    """Entries after a terminal event."""
    unreadable: int = 0
    workers: list[str] = field(default_factory=list)

    @property
    def faultless(self) -> bool:
        faults = (self.doubled, self.missing, self.wrong, self.disordered, self.unreadable)
        return not any(faults) and self.ends == 1 and not self.after_end


@dataclass(frozen=True)
class ResultFindings:
    """How a job ended, according to every result that became visible."""

    status: str | None
    """The first visible terminal status; ``None`` for a job that never ended."""
    ended_s: float | None
    changed: bool
    """Whether a different result became visible after that."""
    changed_materially: bool
    """Whether it differed in status or tokens, not only in its date."""
    tokens_right: bool


@dataclass
class Findings:
    """The totals over all jobs."""

    jobs: int = 0
    tokens: int = 0
    succeeded: int = 0
    lost: int = 0
    failed: int = 0
    """Jobs that ended without success. No job is sent that should fail."""
    wrong_results: int = 0
    changed_results: int = 0
    materially_changed_results: int = 0
    doubled_tokens: int = 0
    missing_tokens: int = 0
    wrong_tokens: int = 0
    disordered_tokens: int = 0
    broken_streams: int = 0
    """Streams of successful jobs with any of these faults, or without exactly one end."""
    withdrawn_entries: int = 0
    unannounced_results: int = 0
    taken_over: int = 0
    """Jobs that more than one worker ran."""
    run_again: int = 0
    """Jobs that started again from the first token."""
    wasted_tokens: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    recovery_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kind of kill: jobs held, and p50 and max seconds to the next event of such a job."""
    latency_s: dict[str, float] = field(default_factory=dict)
    lost_ids: list[str] = field(default_factory=list)
    suspects: dict[str, list[str]] = field(default_factory=dict)
    """Up to ten job ids for each other fault."""

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return self.lost == 0 and not any(
            (
                self.failed, self.wrong_results, self.changed_results, self.doubled_tokens,
                self.missing_tokens, self.wrong_tokens, self.disordered_tokens,
                self.broken_streams, self.withdrawn_entries, self.unannounced_results,
            )
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"clean": self.clean}


def audit(ledger: Ledger, *, unannounced: Sequence[str] = ()) -> Findings:
    """Audits ``ledger``; ``unannounced``: jobs whose result changed without a publication."""
    found = Findings(
        withdrawn_entries=ledger.withdrawn_count(), unannounced_results=len(unannounced)
    )
    suspects: dict[str, list[str]] = {"unannounced": list(unannounced)}
    latencies: list[float] = []

    def suspect(fault: str, job_id: str) -> None:
        suspects.setdefault(fault, []).append(job_id)

    for job in ledger.jobs():
        stream = judge_stream(job, ledger.entries(job.id))
        result = judge_results(job, ledger.results(job.id))
        found.jobs += 1
        found.tokens += job.tokens
        found.doubled_tokens += stream.doubled
        found.wrong_tokens += stream.wrong
        found.disordered_tokens += stream.disordered
        found.taken_over += len(set(stream.workers)) > 1
        found.run_again += stream.runs_from_zero > 1
        found.wasted_tokens += stream.doubled
        found.changed_results += result.changed
        found.materially_changed_results += result.changed_materially
        if stream.doubled:
            suspect("doubled tokens", job.id)
        if stream.wrong or stream.disordered:
            suspect("wrong or disordered tokens", job.id)
        if result.changed:
            suspect("changed result", job.id)
        if result.status is None:
            found.lost += 1
            found.lost_ids.append(job.id)
            continue
        latencies.append((result.ended_s or 0.0) - job.sent_s)
        if result.status != SUCCESS:
            found.failed += 1
            suspect("failed", job.id)
            continue
        found.succeeded += 1
        # A job without an end also lacks tokens, but it counts only as lost.
        found.missing_tokens += stream.missing
        if stream.missing:
            suspect("missing tokens", job.id)
        if not result.tokens_right:
            found.wrong_results += 1
            suspect("wrong result", job.id)
        if not stream.faultless:
            found.broken_streams += 1
            suspect("broken stream", job.id)
    found.kills = dict(Counter(kill.kind for kill in ledger.kills()))
    found.recovery_s = recoveries(ledger)
    found.latency_s = spread(latencies)
    found.suspects = {fault: ids[:10] for fault, ids in suspects.items() if ids}
    return found


def judge_stream(job: Job, entries: Sequence[Entry]) -> StreamFindings:
    """Compares a stream with the tokens that ``job`` must have."""
    found = StreamFindings()
    seen: set[int] = set()
    highest = -1
    for entry in entries:
        event = _object(entry.document)
        kind = event.get("type")
        found.after_end += found.ends > 0
        if kind == "started":
            found.workers.append(str(event.get("worker")))
        elif kind in TERMINAL_EVENTS:
            found.ends += 1
        elif kind == "tokens" and isinstance(event.get("ids"), list):
            first = int(event["index"])
            found.runs_from_zero += first == 0
            for position, token in enumerate(event["ids"], start=first):
                if position in seen:
                    found.doubled += 1
                elif position < highest:
                    found.disordered += 1
                if position >= job.tokens or token != token_id(job.seed, position):
                    found.wrong += 1
                seen.add(position)
                highest = max(highest, position)
        else:
            found.unreadable += 1
    found.seen = len(seen)
    found.missing = len(set(range(job.tokens)) - seen)
    return found


def judge_results(job: Job, results: Sequence[Result]) -> ResultFindings:
    """Compares the results that the backend showed, in order, with the one right result."""
    documents = [(result, _object(result.document)) for result in results]
    ends = [
        place for place, (_, doc) in enumerate(documents) if doc.get("status") in TERMINAL_STATES
    ]
    if not ends:
        return ResultFindings(None, None, False, False, False)
    first, first_document = documents[ends[0]]
    later = [document for _, document in documents[ends[0] + 1 :]]
    expected = [token_id(job.seed, position) for position in range(job.tokens)]
    return ResultFindings(
        status=first_document["status"],
        ended_s=first.seen_s,
        changed=bool(later),
        changed_materially=any(_essence(one) != _essence(first_document) for one in later),
        tokens_right=all(_tokens(document) == expected for document in (first_document, *later)),
    )


def recoveries(ledger: Ledger) -> dict[str, dict[str, float]]:
    """How long the jobs of a struck worker paused, by kind of strike.

    Measured from ``gone_s`` to the job's next tokens or its end, from any worker. Jobs that never
    continued are left out: they are lost.
    """
    by_kind: dict[str, list[float]] = {}
    entries: dict[str, list[Entry]] = {}
    for kill in ledger.kills():
        for job_id, place in kill.held.items():
            if job_id not in entries:
                entries[job_id] = ledger.entries(job_id)
            for entry in entries[job_id][place:]:
                if _object(entry.document).get("type") in ("tokens", *TERMINAL_EVENTS):
                    by_kind.setdefault(kill.kind, []).append(entry.seen_s - kill.gone_s)
                    break
    return {kind: spread(times) for kind, times in by_kind.items()}


def spread(times: Sequence[float]) -> dict[str, float]:
    """Count, median and maximum of ``times`` in seconds."""
    if not times:
        return {"count": 0}
    return {
        "count": len(times),
        "p50": round(statistics.median(times), 3),
        "max": round(max(times), 3),
    }


def _object(document: str) -> dict[str, Any]:
    try:
        value = json.loads(document)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _tokens(document: dict[str, Any]) -> object:
    result = document.get("result")
    try:
        return result["choices"][0]["token_ids"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return None


def _essence(document: dict[str, Any]) -> tuple[object, object]:
    return document.get("status"), _tokens(document)
