"""The audit finds every breach around countdowns, cancels, canvases, poison and commands."""

from __future__ import annotations

from typing import Any

import pytest

from benches.battle.audit import Findings, Seen, audit
from benches.battle.ledger import CANCELLED, POISON, STOCK, Job, Ledger, Reply
from tests.benches.test_audit import (
    FINISHED,
    GOOD_RESULTS,
    GOOD_STREAM,
    LENGTH,
    RUNNING,
    SEED,
    STARTED,
    judged,
    recorded,
    success,
    tokens,
)

REVOKED = {"status": "REVOKED", "result": {"exc_type": "TaskRevokedError"}}
FAILURE = {"status": "FAILURE", "result": {"exc_type": "ChordError"}}
EXHAUSTED = {"status": "FAILURE", "result": {"exc_type": "AttemptsExhausted"}}
WITHDRAWN: dict[str, Any] = {"type": "cancelled"}
FAILED: dict[str, Any] = {"type": "failed"}


def judged_job(
    job: Job,
    stream: list[dict[str, Any]],
    results: list[dict[str, Any]],
    ledger: Ledger | None = None,
) -> Findings:
    return audit(recorded(stream, results, ledger, job))


def of_kind(kind: str, **fields: Any) -> Job:
    return Job("job", SEED, LENGTH, 100.0, kind, **fields)


@pytest.mark.parametrize(
    ("stream", "results", "clean"),
    [
        (GOOD_STREAM, GOOD_RESULTS, True),
        ([WITHDRAWN], [REVOKED], True),
        ([STARTED, tokens(0, 4), WITHDRAWN], [RUNNING, REVOKED], True),
        ([STARTED, tokens(0, 4), FAILED], [RUNNING, FAILURE], False),
        ([WITHDRAWN], [], False),
        ([WITHDRAWN], [REVOKED, success()], False),
        ([STARTED, tokens(0, 4)], [RUNNING, REVOKED], False),
        ([STARTED, tokens(0, 4), WITHDRAWN, tokens(4, 5)], [RUNNING, REVOKED], False),
        ([STARTED, tokens(0, 4), tokens(3, 5), WITHDRAWN], [RUNNING, REVOKED], False),
        ([STARTED, tokens(0, 4), tokens(5, 6), WITHDRAWN], [RUNNING, REVOKED], False),
        ([STARTED, tokens(0, LENGTH - 1), FINISHED], GOOD_RESULTS, False),
    ],
)
def test_a_cancelled_job_succeeds_or_is_revoked_once(
    stream: list[dict[str, Any]], results: list[dict[str, Any]], clean: bool
) -> None:
    assert judged_job(of_kind(CANCELLED), stream, results).clean == clean


def test_a_plain_job_must_not_be_revoked() -> None:
    found = judged([WITHDRAWN], [REVOKED])
    assert (found.counts[Seen.FAILED], found.clean) == (1, False)


@pytest.mark.parametrize(("due_s", "early"), [(100.5, 0), (101.5, 1)])
def test_a_job_that_starts_before_it_is_due_is_early(due_s: float, early: int) -> None:
    """Its first entry and its first result are seen at 101."""
    job = Job("job", SEED, LENGTH, 100.0, due_s=due_s)
    for stream, results in ((GOOD_STREAM, [success()]), (GOOD_STREAM[1:], GOOD_RESULTS)):
        found = judged_job(job, stream, results)
        assert (found.counts[Seen.EARLY], found.clean) == (early, not early)


def test_a_state_that_says_running_too_soon_is_early_and_a_cancel_is_not() -> None:
    late_stream = recorded(job=Job("job", SEED, LENGTH, 100.0, CANCELLED, due_s=103.0))
    assert audit(late_stream).counts[Seen.EARLY] == 1
    job = Job("job", SEED, LENGTH, 100.0, CANCELLED, due_s=103.0)
    assert judged_job(job, [WITHDRAWN], [REVOKED]).clean


def test_an_innocent_job_must_not_run_out_of_attempts_and_a_poison_one_must() -> None:
    stream = [STARTED, tokens(0, 4), FAILED]
    found = judged_job(of_kind(CANCELLED), stream, [RUNNING, EXHAUSTED])
    assert (found.counts[Seen.FAILED], found.counts[Seen.EXHAUSTED], found.clean) == (1, 1, False)
    assert judged_job(of_kind(POISON), stream, [RUNNING, EXHAUSTED]).clean
    for results in ([RUNNING, FAILURE], GOOD_RESULTS, [RUNNING, REVOKED]):
        found = judged_job(of_kind(POISON), stream, results)
        assert (found.counts[Seen.FAILED], found.clean) == (1, False)
    assert judged_job(of_kind(POISON), stream, [RUNNING]).counts[Seen.LOST] == 1


def test_a_retried_dead_letter_ends_once_more() -> None:
    stream = [STARTED, tokens(0, 4), FAILED, STARTED, FAILED]
    results = [RUNNING, EXHAUSTED, RUNNING, EXHAUSTED | {"date_done": "later"}]
    ledger = Ledger()
    ledger.retries["job"] += 1
    found = judged_job(of_kind(POISON), stream, results, ledger)
    assert (found.counts[Seen.RETRIED], found.clean) == (1, True)
    # Without the retry, both are breaches; with it, one end of two is.
    found = judged_job(of_kind(POISON), stream, results)
    assert (found.counts[Seen.CHANGED], found.counts[Seen.BROKEN]) == (1, 1)
    for other in ((stream, results[:3]), (stream[:4], results)):
        ledger = Ledger()
        ledger.retries["job"] += 1
        assert not judged_job(of_kind(POISON), *other, ledger).clean


def parts(*ends: dict[str, Any]) -> tuple[Ledger, tuple[str, ...]]:
    """A ledger with a chord's cancelled parts, which ended like this."""
    ledger = Ledger()
    for number, end in enumerate(ends):
        stream = GOOD_STREAM if end["status"] == "SUCCESS" else [WITHDRAWN]
        recorded(stream, [end], ledger, Job(f"part {number}", SEED, LENGTH, 100.0, CANCELLED))
    return ledger, tuple(f"part {number}" for number in range(len(ends)))


@pytest.mark.parametrize(
    ("part", "results", "runs", "misdispatched", "failed"),
    [
        (success(), [{"status": "SUCCESS"}], 1, 0, 0),
        (success(), [{"status": "SUCCESS"}], 0, 1, 0),
        (success(), [FAILURE], 0, 1, 1),
        (REVOKED, [FAILURE], 0, 0, 0),
        (REVOKED, [FAILURE], 1, 1, 0),
        (REVOKED, [{"status": "SUCCESS"}], 1, 1, 1),
    ],
)
def test_a_stock_body_runs_if_all_parts_succeed_and_else_fails(
    part: dict[str, Any],
    results: list[dict[str, Any]],
    runs: int,
    misdispatched: int,
    failed: int,
) -> None:
    ledger, ids_of_parts = parts(success(), part)
    for _ in range(runs):
        ledger.runs["job"] += 1
    found = judged_job(of_kind(STOCK, after=ids_of_parts), [], results, ledger)
    assert (found.counts[Seen.MISDISPATCHED], found.counts[Seen.FAILED]) == (misdispatched, failed)
    assert found.clean == (not misdispatched and not failed)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("runs", "twice", "wrong"), [(1, 0, 0), (2, 1, 0), (0, 0, 1)])
def test_a_stock_task_of_a_chain_or_chord_runs_at_least_once(
    count: int, runs: int, twice: int, wrong: int
) -> None:
    ledger, first = parts(*[success()] * count)
    for _ in range(runs):
        ledger.runs["job"] += 1
    found = judged_job(of_kind(STOCK, after=first), [], [{"status": "SUCCESS"}], ledger)
    assert (found.counts[Seen.SENT_TWICE], found.counts[Seen.MISDISPATCHED], found.clean) == (
        twice,
        wrong,
        not wrong,
    )


def test_a_body_of_ours_begins_only_if_all_parts_succeed() -> None:
    ledger, ids_of_parts = parts(success(), success())
    body = of_kind("plain", after=ids_of_parts)
    assert judged_job(body, GOOD_STREAM, GOOD_RESULTS, ledger).clean
    ledger, _ = parts(success(), REVOKED)
    assert judged_job(body, [FAILED], [FAILURE], ledger).clean
    for stream, results in (([FAILED], [RUNNING, FAILURE]), ([STARTED, FAILED], [FAILURE])):
        ledger, _ = parts(success(), REVOKED)
        assert judged_job(body, stream, results, ledger).counts[Seen.MISDISPATCHED] == 1
    ledger, _ = parts(success(), REVOKED)
    assert judged_job(body, [], [], ledger).counts[Seen.LOST] == 1


@pytest.mark.parametrize(
    ("refused", "reply", "wrong"),
    [
        (True, {"error": "no"}, 0),
        (True, {"ok": "yes"}, 1),
        (False, {"ok": "pong"}, 0),
        (False, {"error": "no"}, 1),
        (False, [], 0),
    ],
)
def test_a_command_must_be_refused_or_obeyed(refused: bool, reply: Any, wrong: int) -> None:
    ledger = recorded()
    ledger.replies.append(Reply("command", refused, reply))
    found = audit(ledger)
    assert (found.counts[Seen.WRONG_REPLY], found.clean) == (wrong, not wrong)
