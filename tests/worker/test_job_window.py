"""A worker remembers what its last jobs took, and no more than that."""

from __future__ import annotations

import time

import pytest

from llorch_worker.broker.recent_jobs import WINDOW_S, percentile_ms
from llorch_worker.contract import GenerationResult
from llorch_worker.contract.result import Choice, Timings, Usage
from llorch_worker.worker.job_window import MOST_JOBS, JobWindow


def result(*, queue_ms: float = 10, cached: int = 0) -> GenerationResult:
    return GenerationResult(
        id="a job",
        model="toy",
        choices=(Choice(index=0, text="", token_ids=(), finish_reason="stop"),),
        usage=Usage(prompt=100, cached=cached, completion=5),
        seed=1,
        timings=Timings(
            queue_ms=queue_ms, prefill_ms=40, first_token_ms=queue_ms + 40, decode_ms=500
        ),
        worker="w@test",
    )


def test_jobs_are_timed_from_their_enqueueing() -> None:
    window = JobWindow()
    window.succeeded(result(cached=25))
    window.succeeded(result(cached=250))
    window.failed()
    found = window.read()
    assert (found.ended, found.failed) == (3, 1)
    assert found.cache_hits == 0.625  # of a resumed job at most its prompt counts
    assert percentile_ms(found.queue_ms, 0.5) == pytest.approx(10, rel=0.2)
    assert percentile_ms(found.first_token_ms, 0.5) == pytest.approx(50, rel=0.2)
    assert percentile_ms(found.e2e_ms, 0.5) == pytest.approx(550, rel=0.2)


def test_older_jobs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    window, now_s = JobWindow(), time.monotonic()
    window.failed()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + WINDOW_S + 60)
    window.succeeded(result())
    found = window.read()
    assert (found.ended, found.failed) == (1, 0)
    assert found.jobs_per_min == pytest.approx(60 / WINDOW_S)


def test_a_fast_worker_reports_its_last_jobs_and_their_true_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    window, one = JobWindow(), result()
    for _ in range(3 * MOST_JOBS):
        now_s += 0.001
        window.succeeded(one)
    now_s += 1
    found = window.read()
    assert found.ended == MOST_JOBS
    assert found.jobs_per_min == pytest.approx(60 * MOST_JOBS / (MOST_JOBS * 0.001 + 1), rel=0.01)
    assert len(found.model_dump_json()) < 400
