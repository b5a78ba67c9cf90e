"""A worker remembers what its last jobs took, and no more than that."""

from __future__ import annotations

import time
import tracemalloc
from typing import Literal

import pytest

from llorch_worker.broker.fleet.recent_jobs import WINDOW_S, percentile_ms
from llorch_worker.broker.jobs.ended_jobs import EndedJob
from llorch_worker.contract import Timings, Usage
from llorch_worker.worker.job_window import MOST_JOBS, JobWindow


def done(*, cached: int = 0, drafted: int = 0) -> EndedJob:
    return EndedJob(
        id="a job",
        model="toy",
        worker="w@test",
        attempts=1,
        ended_at=0,
        outcome="stop",
        usage=Usage(prompt=100, cached=cached, completion=5, accepted_draft_tokens=drafted),
        timings=Timings(queue_ms=10, prefill_ms=40, first_token_ms=50, decode_ms=500),
    )


def without_result(outcome: Literal["failed", "cancelled"]) -> EndedJob:
    return done().model_copy(update={"outcome": outcome, "usage": None, "timings": None})


def test_jobs_are_timed_from_their_enqueueing() -> None:
    window = JobWindow()
    window.add(done(cached=25))
    window.add(done(cached=250))
    window.add(without_result("failed"))
    window.add(without_result("cancelled"))
    found = window.read()
    assert (found.ended, found.failed) == (3, 1)
    assert found.cache_hits == 0.625  # of a resumed job at most its prompt counts
    assert percentile_ms(found.queue_ms, 0.5) == pytest.approx(10, rel=0.2)
    assert percentile_ms(found.first_token_ms, 0.5) == pytest.approx(50, rel=0.2)
    assert percentile_ms(found.e2e_ms, 0.5) == pytest.approx(550, rel=0.2)


def test_of_a_resumed_job_the_whole_time_counts_and_no_part_of_its_last_attempt() -> None:
    window = JobWindow()
    window.add(done().model_copy(update={"resumed": True}))
    found = window.read()
    assert (found.ended, found.failed, found.completion_tokens) == (1, 0, 5)
    assert (found.queue_ms, found.first_token_ms) == ({}, {})
    assert percentile_ms(found.e2e_ms, 0.5) == pytest.approx(550, rel=0.2)


def test_guessed_tokens_are_a_share_of_all() -> None:
    window = JobWindow()
    window.add(done())
    assert window.read().draft_hits is None, "no worker guesses"
    window.add(done(drafted=4))
    assert window.read().draft_hits == 0.4


def test_older_jobs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    window, now_s = JobWindow(), time.monotonic()
    window.add(without_result("failed"))
    monkeypatch.setattr(time, "monotonic", lambda: now_s + WINDOW_S + 60)
    window.add(done())
    found = window.read()
    assert (found.ended, found.failed) == (1, 0)
    assert found.jobs_per_min == pytest.approx(60 / WINDOW_S)


def test_a_fast_worker_reports_its_last_jobs_and_their_true_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    window, one = JobWindow(), done()
    for _ in range(3 * MOST_JOBS):
        now_s += 0.001
        window.add(one)
    now_s += 1
    found = window.read()
    assert found.ended == MOST_JOBS
    assert found.jobs_per_min == pytest.approx(60 * MOST_JOBS / (MOST_JOBS * 0.001 + 1), rel=0.01)
    assert len(found.model_dump_json()) < 400


def test_all_jobs_of_a_window_take_less_than_a_mebibyte() -> None:
    window = JobWindow()
    tracemalloc.start()
    try:
        for _ in range(MOST_JOBS):
            window.add(done())
        assert window.read().ended == MOST_JOBS
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2**20
