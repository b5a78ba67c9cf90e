"""The jobs that ended in this worker in the last minutes."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from llorch_worker.broker.ended_jobs import EndedJob
from llorch_worker.broker.recent_jobs import WINDOW_S, RecentJobs, by_bucket

MOST_JOBS = 2_000
"""A worker that ends more in the window reports the last ones."""


class _Succeeded(NamedTuple):
    queue_ms: float
    first_token_ms: float
    e2e_ms: float
    prompt_tokens: int
    cached_tokens: int


class JobWindow:
    """Jobs' threads add to it; the announcer's reads it. Adding a job only appends a tuple."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._ended: deque[tuple[float, _Succeeded | None]] = deque(maxlen=MOST_JOBS)

    def add(self, job: EndedJob) -> None:
        if job.outcome == "cancelled":
            return
        timed = None
        if job.timings is not None and job.usage is not None:
            timed = _Succeeded(
                queue_ms=job.timings.queue_ms,
                first_token_ms=job.timings.first_token_ms,
                e2e_ms=job.timings.first_token_ms + job.timings.decode_ms,
                prompt_tokens=job.usage.prompt,
                # A resumed job also finds what it generated before.
                cached_tokens=min(job.usage.cached, job.usage.prompt),
            )
        self._ended.append((time.monotonic(), timed))

    def read(self) -> RecentJobs:
        now_s = time.monotonic()
        # Copied in one step: other threads append meanwhile.
        ended = tuple(self._ended)
        since_s = max(self._began_s, now_s - WINDOW_S)
        if len(ended) == MOST_JOBS:
            since_s = max(since_s, ended[0][0])
        recent = [job for at_s, job in ended if at_s >= since_s]
        done = [job for job in recent if job is not None]
        return RecentJobs(
            ended=len(recent),
            failed=len(recent) - len(done),
            jobs_per_min=60 * len(recent) / max(1.0, now_s - since_s),
            prompt_tokens=sum(job.prompt_tokens for job in done),
            cached_tokens=sum(job.cached_tokens for job in done),
            queue_ms=by_bucket(job.queue_ms for job in done),
            first_token_ms=by_bucket(job.first_token_ms for job in done),
            e2e_ms=by_bucket(job.e2e_ms for job in done),
        )
