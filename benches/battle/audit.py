"""The audit of a ledger: jobs and tokens that were lost, doubled, missing or wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benches.battle.ledger import (
    CANCELLED,
    PLAIN,
    POISON,
    STOCK,
    Entry,
    Job,
    Ledger,
    Result,
)
from benches.battle.recovery import TERMINAL_EVENTS, read_object, recoveries, spread
from tests.toy_generation import token_id

SUCCESS, FAILURE, REVOKED = "SUCCESS", "FAILURE", "REVOKED"
TERMINAL_STATES = (SUCCESS, FAILURE, REVOKED)
EXHAUSTED = "AttemptsExhausted"
CLOCK_S = 0.002
"""Celery cuts a due time, and Redis its clock, to whole milliseconds."""


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
    began_s: float | None = None
    """When the first of its entries other than an end was seen."""
    gaps: int = 0
    """Tokens that are missing before the last one seen."""

    @property
    def faultless(self) -> bool:
        faults = (self.doubled, self.missing, self.wrong, self.disordered, self.unreadable)
        return not any(faults) and self.ended_well

    @property
    def ended_well(self) -> bool:
        return self.ends == 1 and not self.after_end


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
    began_s: float | None = None
    """When the first state that is not terminal was seen."""
    exhausted: bool = False


@dataclass
class Findings:
    """The totals over all jobs."""

    jobs: int = 0
    tokens: int = 0
    succeeded: int = 0
    lost: int = 0
    failed: int = 0
    """Jobs that ended as their kind must not."""
    exhausted: int = 0
    """Innocent jobs among them that had no attempts left."""
    early: int = 0
    """Jobs that began before they were due."""
    misdispatched: int = 0
    """Jobs that began, or stock tasks that did not run once, against what their parts' ends say."""
    sent_twice: int = 0
    """Stock tasks after our jobs that ran again, under the same id. No breach: Celery promises them
    at least once. Of our own jobs the second copy is dropped."""
    wrong_replies: int = 0
    """Replies of workers that refuse what works, or accept what cannot be done."""
    replies: dict[str, int] = field(default_factory=dict)
    retried: int = 0
    ends: dict[str, dict[str, int]] = field(default_factory=dict)
    """By kind of job: how many ended how."""
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
    """By kind of kill: jobs held, and p50, p95 and max seconds to the next event of such a job."""
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
                self.exhausted, self.early, self.misdispatched, self.wrong_replies,
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

    retries, runs, jobs = ledger.retries(), ledger.runs(), ledger.jobs()
    results = {job.id: judge_results(job, ledger.results(job.id), retries[job.id]) for job in jobs}
    for job in jobs:
        stream = judge_stream(job, ledger.entries(job.id), retries[job.id])
        result = results[job.id]
        allowed = allowed_ends(job, results)
        begins_s = [each for each in (stream.began_s, result.began_s) if each is not None]
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
        if begins_s and min(begins_s) < job.due_s - CLOCK_S:
            found.early += 1
            suspect("early", job.id)
        ready = SUCCESS in allowed
        run = runs[job.id]
        if job.kind == STOCK and job.after and run > 1:
            # Celery sends a chain's next task before it stores the result, and a chord's body
            # before it notes that it has, so a death in between has it sent twice.
            found.sent_twice, run = found.sent_twice + 1, 1
        if run != ready if job.kind == STOCK else job.after and begins_s and not ready:
            found.misdispatched += 1
            suspect("misdispatched", job.id)
        ends = found.ends.setdefault(_kind(job), {})
        ends[str(result.status)] = ends.get(str(result.status), 0) + 1
        if result.status is None:
            found.lost += 1
            found.lost_ids.append(job.id)
            continue
        if _kind(job) == PLAIN:
            latencies.append((result.ended_s or 0.0) - job.sent_s)
        if result.status not in allowed or (job.kind == POISON) != result.exhausted:
            found.failed += 1
            found.exhausted += result.exhausted
            suspect("failed", job.id)
            continue
        if job.kind == STOCK:
            continue
        if result.status != SUCCESS:
            found.missing_tokens += stream.gaps
            if stream.gaps or not stream.ended_well:
                found.broken_streams += 1
                suspect("broken stream", job.id)
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
    replies = ledger.replies()
    wrong = [reply for reply in replies if _is_error(reply.reply) != reply.refused]
    found.wrong_replies = len(wrong)
    suspects["wrong replies"] = [f"{reply.command}: {reply.reply}" for reply in wrong]
    found.replies = dict(Counter(reply.command for reply in replies))
    found.retried = retries.total()
    found.kills = dict(Counter(kill.kind for kill in ledger.kills()))
    found.recovery_s = recoveries(ledger)
    found.latency_s = spread(latencies)
    found.suspects = {fault: ids[:10] for fault, ids in suspects.items() if ids}
    return found


def allowed_ends(job: Job, results: Mapping[str, ResultFindings]) -> tuple[str, ...]:
    """The states in which ``job`` may end."""
    if job.after:
        whole = all(results[part].status == SUCCESS for part in job.after)
        return (SUCCESS,) if whole else (FAILURE,)
    return {CANCELLED: (SUCCESS, REVOKED), POISON: (FAILURE,)}.get(job.kind, (SUCCESS,))


def judge_stream(job: Job, entries: Sequence[Entry], retries: int = 0) -> StreamFindings:
    """Compares a stream with the tokens that ``job`` must have, after as many retries."""
    found = StreamFindings()
    seen: set[int] = set()
    highest = -1
    for entry in entries:
        event = read_object(entry.document)
        kind = event.get("type")
        found.after_end += found.ends > 0
        if kind not in TERMINAL_EVENTS:
            found.began_s = min(entry.seen_s, found.began_s or entry.seen_s)
        if kind == "failed" and retries:
            retries -= 1
        elif kind == "started":
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
    found.gaps = highest + 1 - len(seen)
    return found


def judge_results(job: Job, results: Sequence[Result], retries: int = 0) -> ResultFindings:
    """Compares the results that the backend showed, in order, with the one right result. A retry
    withdraws one failure."""
    documents = [(result, read_object(result.document)) for result in results]
    ends = [
        place for place, (_, doc) in enumerate(documents) if doc.get("status") in TERMINAL_STATES
    ]
    running_s = [each.seen_s for each, doc in documents if doc.get("status") not in TERMINAL_STATES]
    began_s = min(running_s, default=None)
    if len(ends) <= retries:
        return ResultFindings(None, None, False, False, False, began_s)
    ends = ends[retries:]
    first, first_document = documents[ends[0]]
    later = [document for _, document in documents[ends[0] + 1 :]]
    expected = [token_id(job.seed, position) for position in range(job.tokens)]
    return ResultFindings(
        status=first_document["status"],
        ended_s=first.seen_s,
        changed=bool(later),
        changed_materially=any(_essence(one) != _essence(first_document) for one in later),
        tokens_right=all(_tokens(document) == expected for document in (first_document, *later)),
        began_s=began_s,
        exhausted=_exhausted(first_document),
    )


def _kind(job: Job) -> str:
    """The job's kind in the report."""
    if job.after:
        return "stock, after our jobs" if job.kind == STOCK else "ours, after our jobs"
    return f"{job.kind}, countdown" if job.due_s else job.kind


def _is_error(reply: object) -> bool:
    return isinstance(reply, dict) and "error" in reply


def _exhausted(document: Mapping[str, Any]) -> bool:
    result = document.get("result")
    return isinstance(result, dict) and result.get("exc_type") == EXHAUSTED


def _tokens(document: dict[str, Any]) -> object:
    result = document.get("result")
    try:
        return result["choices"][0]["token_ids"]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return None


def _essence(document: dict[str, Any]) -> tuple[object, object]:
    return document.get("status"), _tokens(document)
