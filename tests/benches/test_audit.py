"""The ledger's accounting, on event sequences made by hand: every breach is found, nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benches.battle.audit import Findings, audit
from benches.battle.ledger import Entry, Job, Kill, Ledger, Result
from tests.toy_generation import token_id

SEED = 7
LENGTH = 10
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


def judged(
    stream: list[dict[str, Any]] = GOOD_STREAM, results: list[dict[str, Any]] = GOOD_RESULTS
) -> Findings:
    """The findings about one job with this stream and these results, one entry a second."""
    return audit(recorded(stream, results))


def recorded(stream: list[dict[str, Any]], results: list[dict[str, Any]]) -> Ledger:
    ledger = Ledger()
    ledger.sent(Job("job", SEED, LENGTH, sent_s=100.0))
    for number, event in enumerate(stream, start=1):
        ledger.entry("job", Entry(f"{number}-0", 100.0 + number, json.dumps(event)))
    for number, document in enumerate(results, start=1):
        ledger.result("job", Result(100.0 + number, json.dumps(document)))
    return ledger


def test_a_faultless_job_is_clean() -> None:
    found = judged()
    assert found.clean
    assert (found.jobs, found.succeeded, found.tokens) == (1, 1, LENGTH)
    assert (found.lost, found.wasted_tokens, found.taken_over, found.suspects) == (0, 0, 0, {})
    assert found.latency_s == {"count": 1, "p50": 2.0, "max": 2.0}


def test_a_job_resumed_by_another_worker_is_clean() -> None:
    found = judged([STARTED, tokens(0, 4), STARTED | {"worker": "b"}, tokens(4, LENGTH), FINISHED])
    assert found.clean
    assert (found.taken_over, found.run_again, found.wasted_tokens) == (1, 0, 0)


def test_a_job_run_again_from_zero_shows_its_tokens_twice() -> None:
    found = judged([STARTED, tokens(0, 4), STARTED | {"worker": "b"}, tokens(0, LENGTH), FINISHED])
    assert not found.clean
    assert (found.doubled_tokens, found.wasted_tokens, found.run_again) == (4, 4, 1)
    assert found.broken_streams == 1
    assert found.suspects["doubled tokens"] == ["job"]


@pytest.mark.parametrize(
    ("stream", "fault", "count"),
    [
        ([STARTED, tokens(0, 6), tokens(4, LENGTH), FINISHED], "doubled_tokens", 2),
        ([STARTED, tokens(0, LENGTH), tokens(9, LENGTH), FINISHED], "doubled_tokens", 1),
        ([STARTED, tokens(0, 4), tokens(6, LENGTH), FINISHED], "missing_tokens", 2),
        ([STARTED, tokens(0, 9), FINISHED], "missing_tokens", 1),
        ([STARTED, FINISHED], "missing_tokens", LENGTH),
        ([], "missing_tokens", LENGTH),
        ([STARTED, tokens(4, LENGTH), tokens(0, 4), FINISHED], "disordered_tokens", 4),
        (
            [STARTED, tokens(0, 4, ids=ids(0, 1, 2, 3, seed=8)), tokens(4, LENGTH), FINISHED],
            "wrong_tokens",
            4,
        ),
        ([STARTED, tokens(0, LENGTH + 2), FINISHED], "wrong_tokens", 2),
        ([STARTED, tokens(0, LENGTH)], "broken_streams", 1),
        ([STARTED, tokens(0, LENGTH), FINISHED, FINISHED], "broken_streams", 1),
        ([STARTED, tokens(0, LENGTH), {"type": "failed"}, FINISHED], "broken_streams", 1),
        ([STARTED, tokens(0, 9), FINISHED, tokens(9, LENGTH)], "broken_streams", 1),
        ([STARTED, tokens(0, LENGTH), {"type": "new"}, FINISHED], "broken_streams", 1),
        ([STARTED, tokens(0, LENGTH), FINISHED, STARTED], "broken_streams", 1),
    ],
)
def test_a_fault_of_the_stream_is_counted(
    stream: list[dict[str, Any]], fault: str, count: int
) -> None:
    found = judged(stream)
    assert getattr(found, fault) == count
    assert found.broken_streams == 1
    assert not found.clean
    assert found.suspects["broken stream"] == ["job"]


@pytest.mark.parametrize("results", [[], [RUNNING], [RUNNING, {"status": "RETRY"}]])
def test_a_job_without_a_terminal_result_is_lost(results: list[dict[str, Any]]) -> None:
    found = judged(results=results)
    assert (found.lost, found.lost_ids, found.succeeded) == (1, ["job"], 0)
    assert not found.clean


def test_a_lost_job_is_counted_once_and_not_token_by_token() -> None:
    found = judged([STARTED, tokens(0, 4)], [RUNNING])
    assert (found.lost, found.missing_tokens, found.broken_streams) == (1, 0, 0)


@pytest.mark.parametrize("status", ["FAILURE", "REVOKED"])
def test_a_job_that_ends_badly_is_failed_and_not_lost(status: str) -> None:
    found = judged([STARTED, {"type": "failed"}], [RUNNING, {"status": status}])
    assert (found.failed, found.lost, found.clean) == (1, 0, False)


def test_a_result_with_other_tokens_is_wrong() -> None:
    other = {"choices": [{"token_ids": ids(*range(LENGTH - 1))}]}
    found = judged(results=[success(result=other)])
    assert (found.wrong_results, found.clean) == (1, False)
    assert judged(results=[success(result=None)]).wrong_results == 1


@pytest.mark.parametrize(
    ("later", "materially"),
    [
        (success(date_done="later"), 0),
        (success(result={"choices": [{"token_ids": []}]}), 1),
        ({"status": "FAILURE"}, 1),
        (RUNNING, 1),
    ],
)
def test_whatever_follows_a_terminal_result_is_a_change(
    later: dict[str, Any], materially: int
) -> None:
    found = judged(results=[RUNNING, success(), later])
    assert found.changed_results == 1
    assert found.materially_changed_results == materially
    assert not found.clean


def test_the_same_result_stored_again_is_no_change() -> None:
    found = judged(results=[RUNNING, success(), success()])
    assert found.clean


def test_withdrawn_entries_and_unannounced_results_are_breaches() -> None:
    ledger = recorded(GOOD_STREAM, GOOD_RESULTS)
    assert not audit(ledger, unannounced=["job"]).clean
    ledger.withdrawn("job", "2-0")
    found = audit(ledger)
    assert (found.withdrawn_entries, found.clean) == (1, False)


def test_recovery_counts_from_the_kill_to_the_next_sign_of_the_job() -> None:
    ledger = recorded(GOOD_STREAM, GOOD_RESULTS)
    ledger.kill(Kill("SIGKILL", "", "a", gone_s=102.5, held={"job": 2}))
    ledger.kill(Kill("network", "reset", "a", gone_s=103.5, held={"job": 3}))
    ledger.kill(Kill("SIGKILL", "", "b", gone_s=99.0, held={}))
    ledger.kill(Kill("SIGQUIT", "", "c", gone_s=105.0, held={"job": 4}))
    found = audit(ledger)
    assert found.recovery_s == {
        "SIGKILL": {"count": 1, "p50": 0.5, "max": 0.5},
        "network": {"count": 1, "p50": 0.5, "max": 0.5},
    }
    assert found.kills == {"SIGKILL": 2, "network": 1, "SIGQUIT": 1}


def test_a_new_start_alone_is_no_recovery() -> None:
    restarted = [STARTED, tokens(0, 4), STARTED, tokens(4, LENGTH), FINISHED]
    ledger = recorded(restarted, GOOD_RESULTS)
    ledger.kill(Kill("SIGKILL", "", "a", gone_s=102.0, held={"job": 2}))
    assert audit(ledger).recovery_s["SIGKILL"]["max"] == 2.0, "the tokens came at 104"


def test_jobs_are_judged_each_by_its_own_entries() -> None:
    ledger = recorded(GOOD_STREAM, GOOD_RESULTS)
    ledger.sent(Job("other", 8, 2, sent_s=100.0))
    ledger.entry("other", Entry("1-0", 101.0, json.dumps(STARTED)))
    event = {"type": "tokens", "index": 0, "ids": ids(0, 1, seed=8)}
    ledger.entry("other", Entry("2-0", 102.0, json.dumps(event)))
    ledger.entry("other", Entry("3-0", 103.0, json.dumps(FINISHED)))
    document = success(result={"choices": [{"token_ids": ids(0, 1, seed=8)}]})
    ledger.result("other", Result(103.0, json.dumps(document)))
    found = audit(ledger)
    assert found.clean
    assert (found.jobs, found.succeeded) == (2, 2)
