"""The audit finds every breach in event sequences made by hand, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benches.battle.audit import Findings, Seen, audit
from benches.battle.ledger import Entry, Job, Kill, Ledger, Result
from tests.toy_generation import token_id

SEED = 7
LENGTH = 10
JOB = Job("job", SEED, LENGTH, sent_s=100.0)
STARTED: dict[str, Any] = {"type": "started", "worker": "a"}
FINISHED: dict[str, Any] = {"type": "finished"}


def ids(*positions: int, seed: int = SEED) -> list[int]:
    return [token_id(seed, position) for position in positions]


def tokens(first: int, last: int, **other: Any) -> dict[str, Any]:
    """The event with the right tokens from ``first`` to before ``last``."""
    return {"type": "tokens", "index": first, "ids": ids(*range(first, last))} | other


def success(**other: Any) -> dict[str, Any]:
    result = {"choices": [{"token_ids": ids(*range(LENGTH))}]}
    return {"status": "SUCCESS", "result": result, "date_done": "noon"} | other


RUNNING = {"status": "STARTED", "result": None}
GOOD_STREAM = [STARTED, tokens(0, 4), tokens(4, LENGTH), FINISHED]
GOOD_RESULTS = [RUNNING, success()]


def recorded(
    stream: list[dict[str, Any]] = GOOD_STREAM,
    results: list[dict[str, Any]] = GOOD_RESULTS,
    ledger: Ledger | None = None,
    job: Job = JOB,
) -> Ledger:
    """A ledger with ``job``, its stream and its results, one entry a second."""
    ledger = ledger or Ledger()
    ledger.jobs.append(job)
    for number, event in enumerate(stream, start=1):
        ledger.entry(job.id, Entry(f"{number}-0", 100.0 + number, json.dumps(event)))
    for number, document in enumerate(results, start=1):
        ledger.result(job.id, Result(100.0 + number, json.dumps(document)))
    return ledger


def judged(
    stream: list[dict[str, Any]] = GOOD_STREAM, results: list[dict[str, Any]] = GOOD_RESULTS
) -> Findings:
    return audit(recorded(stream, results))


def test_a_faultless_job_is_clean() -> None:
    found = judged()
    assert found.clean
    assert (found.counts[Seen.JOBS], found.counts[Seen.TOKENS], found.ends) == (
        1, LENGTH, {"plain": {"SUCCESS": 1}},
    )  # fmt: skip
    assert (found.counts[Seen.TAKEN_OVER], found.suspects) == (0, {})
    assert found.latency_s == {"count": 1, "p50": 2.0, "p95": 2.0, "max": 2.0}


def test_a_second_worker_that_resumes_is_clean_and_one_that_starts_again_is_not() -> None:
    begun = [STARTED, tokens(0, 4), STARTED | {"worker": "b"}]
    found = judged([*begun, tokens(4, LENGTH), FINISHED])
    assert found.clean
    assert (found.counts[Seen.TAKEN_OVER], found.counts[Seen.RUN_AGAIN]) == (1, 0)
    found = judged([*begun, tokens(0, LENGTH), FINISHED])
    assert not found.clean
    assert (found.counts[Seen.TAKEN_OVER], found.counts[Seen.RUN_AGAIN]) == (1, 1)
    assert (found.counts[Seen.DOUBLED], found.counts[Seen.BROKEN]) == (4, 1)
    assert found.suspects[Seen.DOUBLED] == ["job"]


@pytest.mark.parametrize(
    ("stream", "fault", "count"),
    [
        ([STARTED, tokens(0, 6), tokens(4, LENGTH), FINISHED], Seen.DOUBLED, 2),
        ([STARTED, tokens(0, LENGTH), tokens(9, LENGTH), FINISHED], Seen.DOUBLED, 1),
        ([STARTED, tokens(0, 4), tokens(6, LENGTH), FINISHED], Seen.MISSING, 2),
        ([STARTED, tokens(0, 9), FINISHED], Seen.MISSING, 1),
        ([STARTED, FINISHED], Seen.MISSING, LENGTH),
        ([], Seen.MISSING, LENGTH),
        ([STARTED, tokens(4, LENGTH), tokens(0, 4), FINISHED], Seen.DISORDERED, 4),
        ([STARTED, tokens(0, 4, ids=ids(*range(4), seed=8)), *GOOD_STREAM[2:]], Seen.WRONG, 4),
        ([STARTED, tokens(0, LENGTH + 2), FINISHED], Seen.WRONG, 2),
        ([STARTED, tokens(0, LENGTH)], Seen.BROKEN, 1),
        ([STARTED, tokens(0, LENGTH), FINISHED, FINISHED], Seen.BROKEN, 1),
        ([STARTED, tokens(0, LENGTH), {"type": "failed"}, FINISHED], Seen.BROKEN, 1),
        ([STARTED, tokens(0, 9), FINISHED, tokens(9, LENGTH)], Seen.BROKEN, 1),
        ([STARTED, tokens(0, LENGTH), {"type": "new"}, FINISHED], Seen.BROKEN, 1),
        ([STARTED, tokens(0, LENGTH), FINISHED, STARTED], Seen.BROKEN, 1),
    ],
)
def test_a_fault_of_the_stream_is_counted(
    stream: list[dict[str, Any]], fault: Seen, count: int
) -> None:
    found = judged(stream)
    assert found.counts[fault] == count
    assert found.counts[Seen.BROKEN] == 1
    assert not found.clean
    assert found.suspects[Seen.BROKEN] == ["job"]


@pytest.mark.parametrize("results", [[], [RUNNING], [RUNNING, {"status": "RETRY"}]])
def test_a_job_without_a_terminal_result_is_lost(results: list[dict[str, Any]]) -> None:
    found = judged([STARTED, tokens(0, 4)], results)
    assert (found.suspects, found.clean) == ({Seen.LOST: ["job"]}, False)
    assert judged(results=results).counts[Seen.LOST] == 1
    # It counts once, not token by token.
    assert (found.counts[Seen.MISSING], found.counts[Seen.BROKEN]) == (0, 0)


@pytest.mark.parametrize("result", [None, {"choices": [{"token_ids": ids(*range(LENGTH - 1))}]}])
def test_a_result_with_other_tokens_is_wrong(result: Any) -> None:
    found = judged(results=[success(result=result)])
    assert (found.counts[Seen.WRONG_RESULT], found.clean) == (1, False)


@pytest.mark.parametrize(
    ("later", "changes", "materially"),
    [
        (success(), 0, 0),
        (success(date_done="later"), 1, 0),
        (success(result={"choices": [{"token_ids": []}]}), 1, 1),
        ({"status": "FAILURE"}, 1, 1),
        (RUNNING, 1, 1),
    ],
)
def test_anything_else_after_a_terminal_result_is_a_change(
    later: dict[str, Any], changes: int, materially: int
) -> None:
    found = judged(results=[RUNNING, success(), later])
    assert (found.counts[Seen.CHANGED], found.counts[Seen.MATERIALLY_CHANGED]) == (
        changes,
        materially,
    )
    assert found.clean == (changes == 0)


def test_withdrawn_entries_and_unannounced_results_are_breaches() -> None:
    ledger = recorded()
    assert not audit(ledger, unannounced=["job"]).clean
    ledger.withdrawn.append(("job", "2-0"))
    found = audit(ledger)
    assert (found.counts[Seen.WITHDRAWN], found.clean) == (1, False)


def test_recovery_counts_from_the_kill_to_the_next_sign_of_the_job() -> None:
    ledger = recorded()
    ledger.kills.append(Kill("SIGKILL", "", "a", gone_s=102.5, held={"job": 2}))
    ledger.kills.append(Kill("network", "reset", "a", gone_s=103.5, held={"job": 3}))
    ledger.kills.append(Kill("SIGKILL", "", "b", gone_s=99.0, held={}))
    ledger.kills.append(Kill("SIGQUIT", "", "c", gone_s=105.0, held={"job": 4}))
    found = audit(ledger)
    assert found.recovery_s == {
        "SIGKILL": {"count": 1, "p50": 0.5, "p95": 0.5, "max": 0.5},
        "network": {"count": 1, "p50": 0.5, "p95": 0.5, "max": 0.5},
        "all": {"count": 2, "p50": 0.5, "p95": 0.5, "max": 0.5},
    }
    assert found.kills == {"SIGKILL": 2, "network": 1, "SIGQUIT": 1}


@pytest.mark.parametrize(("again_s", "once"), [(102.7, False), (103.5, True)])
def test_a_job_whose_next_worker_is_struck_before_its_first_sign_was_not_struck_once(
    again_s: float, once: bool
) -> None:
    claims = [{"status": "STARTED", "result": {"hostname": name}} for name in ("a", "b")]
    ledger = recorded(results=[*claims, success()])
    ledger.kills.append(Kill("SIGKILL", "", "a", gone_s=102.5, held={"job": 2}))
    ledger.kills.append(Kill("network", "", "b", gone_s=again_s, held={}))
    assert ("SIGKILL, struck once" in audit(ledger).recovery_s) == once


def test_the_pauses_of_low_jobs_are_apart_because_they_also_wait_for_more_urgent_ones() -> None:
    ledger = recorded()
    ledger.jobs = [replace(job, is_low=True) for job in ledger.jobs]
    ledger.kills.append(Kill("SIGKILL", "", "a", gone_s=102.5, held={"job": 2}))
    found = set(audit(ledger).recovery_s)
    assert found == {"SIGKILL", "SIGKILL, low, struck once", "all", "all, low, struck once"}


def test_a_new_start_alone_is_no_recovery() -> None:
    ledger = recorded([STARTED, tokens(0, 4), STARTED, tokens(4, LENGTH), FINISHED])
    ledger.kills.append(Kill("SIGKILL", "", "a", gone_s=102.0, held={"job": 2}))
    assert audit(ledger).recovery_s["SIGKILL"]["max"] == 2.0, "the tokens came at 104"
