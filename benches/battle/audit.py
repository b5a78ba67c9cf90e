"""The audit of a ledger: jobs and tokens that were lost, doubled, missing or wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from benches.battle.ledger import CANCELLED, PLAIN, POISON, STOCK, Entry, Job, Ledger, Result
from benches.battle.recovery import TERMINAL_EVENTS, read_object, recoveries, spread
from tests.toy_generation import token_id

SUCCESS, FAILURE, REVOKED = "SUCCESS", "FAILURE", "REVOKED"
TERMINAL_STATES = (SUCCESS, FAILURE, REVOKED)
EXHAUSTED = "AttemptsExhausted"
MOST_SUSPECTS = 10
CLOCK_S = 0.002
"""Celery cuts a due time, and Redis its clock, to whole milliseconds."""


@dataclass
class StreamFindings:
    """What a live reader of a job's stream saw. Most counts are of tokens."""

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


class Seen(StrEnum):
    """What the audit counts; the value is its line in the report."""

    JOBS = "jobs sent"
    TOKENS = "tokens promised"
    LOST = "jobs lost"
    FAILED = "jobs that ended otherwise than they must"
    EXHAUSTED = "innocent jobs without attempts left"
    EARLY = "jobs begun before they were due"
    MISDISPATCHED = "bodies of chords and chains misdispatched"
    """Jobs that began, or stock tasks that did not run once, against what their parts' ends say."""
    SENT_TWICE = "bodies of chords and chains sent twice"
    """Stock tasks after our jobs that ran again, under the same id. Celery promises them at least
    once. Of our own jobs the second copy is dropped."""
    WRONG_REPLY = "wrong replies to commands"
    """Replies of workers that refuse what works, or accept what cannot be done."""
    UNANNOUNCED = "results unannounced"
    CHANGED = "results changed after they were visible"
    MATERIALLY_CHANGED = "results changed in status or tokens"
    WRONG_RESULT = "wrong results"
    DOUBLED = "doubled stream tokens"
    MISSING = "missing stream tokens"
    WRONG = "wrong stream tokens"
    DISORDERED = "disordered stream tokens"
    BROKEN = "streams with any fault"
    """Of jobs that ended as they must; also those without exactly one end."""
    WITHDRAWN = "stream entries withdrawn"
    TAKEN_OVER = "jobs taken over by another worker"
    RUN_AGAIN = "jobs run again from zero"
    RETRIED = "dead letters retried"


NO_BREACH = {
    *(Seen.JOBS, Seen.TOKENS, Seen.SENT_TWICE, Seen.TAKEN_OVER, Seen.RUN_AGAIN, Seen.RETRIED)
}


@dataclass
class Findings:
    """The totals over all jobs."""

    counts: Counter[Seen] = field(default_factory=Counter)
    suspects: dict[Seen, list[str]] = field(default_factory=dict)
    """For each breach, up to ten jobs or replies."""
    ends: dict[str, Counter[str]] = field(default_factory=dict)
    """By kind of job: how many ended how."""
    replies: dict[str, int] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)
    recovery_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kind of kill: jobs held, and p50, p95 and max seconds to the next event of such a job."""
    latency_s: dict[str, float] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return not any(count for what, count in self.counts.items() if what not in NO_BREACH)

    def see(self, what: Seen, who: str, times: float = 1) -> None:
        self.counts[what] += int(times)
        if times and what not in NO_BREACH:
            suspects = self.suspects.setdefault(what, [])
            suspects += [who] if len(suspects) < MOST_SUSPECTS else []


def audit(ledger: Ledger, *, unannounced: Sequence[str] = ()) -> Findings:
    """Audits ``ledger``; ``unannounced``: jobs whose result changed without a publication."""
    found = Findings()
    see = found.see
    for job_id in unannounced:
        see(Seen.UNANNOUNCED, job_id)
    for job_id, _ in ledger.withdrawn:
        see(Seen.WITHDRAWN, job_id)
    for reply in ledger.replies:
        wrong = _is_error(reply.reply) != reply.refused
        see(Seen.WRONG_REPLY, f"{reply.command}: {reply.reply}", wrong)
    jobs, retries = ledger.jobs, ledger.retries
    results = {job.id: judge_results(job, ledger.results[job.id], retries[job.id]) for job in jobs}
    latencies: list[float] = []
    for job in jobs:
        stream, result = judge_stream(job, ledger.entries[job.id], retries[job.id]), results[job.id]
        _see_parts(found, job, stream, result)
        allowed = allowed_ends(job, results)
        _see_dispatch(found, job, stream, result, ledger.runs[job.id], ready=SUCCESS in allowed)
        found.ends.setdefault(_kind(job), Counter())[str(result.status)] += 1
        if result.status is None:
            see(Seen.LOST, job.id)
            continue
        if _kind(job) == PLAIN:
            latencies.append((result.ended_s or 0.0) - job.sent_s)
        if result.status not in allowed or (job.kind == POISON) != result.exhausted:
            see(Seen.FAILED, job.id)
            see(Seen.EXHAUSTED, job.id, result.exhausted)
        elif job.kind != STOCK:
            # A job without an end also lacks tokens, but it counts only as lost.
            whole = result.status == SUCCESS
            see(Seen.MISSING, job.id, stream.missing if whole else stream.gaps)
            see(Seen.WRONG_RESULT, job.id, whole and not result.tokens_right)
            intact = stream.faultless if whole else stream.ended_well and not stream.gaps
            see(Seen.BROKEN, job.id, not intact)
    found.replies = dict(Counter(reply.command for reply in ledger.replies))
    found.counts[Seen.RETRIED] = retries.total()
    found.kills = dict(Counter(kill.kind for kill in ledger.kills))
    found.recovery_s = recoveries(ledger)
    found.latency_s = spread(latencies)
    return found


def _see_parts(found: Findings, job: Job, stream: StreamFindings, result: ResultFindings) -> None:
    """What is counted of every job, however it ended."""
    for what, times in {
        Seen.JOBS: 1,
        Seen.TOKENS: job.tokens,
        Seen.DOUBLED: stream.doubled,
        Seen.WRONG: stream.wrong,
        Seen.DISORDERED: stream.disordered,
        Seen.TAKEN_OVER: len(set(stream.workers)) > 1,
        Seen.RUN_AGAIN: stream.runs_from_zero > 1,
        Seen.CHANGED: result.changed,
        Seen.MATERIALLY_CHANGED: result.changed_materially,
    }.items():
        found.see(what, job.id, times)


def _see_dispatch(
    found: Findings,
    job: Job,
    stream: StreamFindings,
    result: ResultFindings,
    runs: int,
    *,
    ready: bool,
) -> None:
    """Whether the job began when it should. ``ready``: whether it should at all."""
    begins_s = [each for each in (stream.began_s, result.began_s) if each is not None]
    found.see(Seen.EARLY, job.id, any(each < job.due_s - CLOCK_S for each in begins_s))
    if job.kind != STOCK:
        found.see(Seen.MISDISPATCHED, job.id, bool(job.after and begins_s and not ready))
        return
    if job.after and runs > 1:
        # Celery sends a chain's next task before it stores the result, and a chord's body before it
        # notes that it has, so a death in between has it sent twice.
        found.see(Seen.SENT_TWICE, job.id)
        runs = 1
    found.see(Seen.MISDISPATCHED, job.id, runs != ready)


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
