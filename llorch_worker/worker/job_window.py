"""The jobs that ended in this worker in the last minutes."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from llorch_worker.broker.fleet.recent_jobs import WINDOW_S, RecentJobs, by_bucket
from llorch_worker.broker.jobs.ended_jobs import EndedJob

MOST_JOBS = 2_000
"""A worker that ends more in the window reports the last ones."""


class _Done(NamedTuple):
    """What is told of a success: a fifth of the memory of its :class:`.EndedJob`."""

    resumed: bool
    prompt: int
    cached: int
    completion: int
    accepted_draft_tokens: int
    queue_ms: float
    first_token_ms: float
    e2e_ms: float


class JobWindow:
    """Jobs' threads add to it; the announcer's reads it. Adding a job only appends a tuple."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._ended: deque[tuple[float, _Done | None]] = deque(maxlen=MOST_JOBS)

    def add(self, job: EndedJob) -> None:
        if job.outcome != "cancelled":
            self._ended.append((time.monotonic(), _done(job)))

    def read(self) -> RecentJobs:
        now_s = time.monotonic()
        # Copied in one step: other threads append meanwhile.
        ended = tuple(self._ended)
        since_s = max(self._began_s, now_s - WINDOW_S)
        if len(ended) == MOST_JOBS:
            since_s = max(since_s, ended[0][0])
        recent = [job for at_s, job in ended if at_s >= since_s]
        done = [job for job in recent if job is not None]
        # Nobody knows when a resumed job began, but when it ended.
        whole = [job for job in done if not job.resumed]
        return RecentJobs(
            ended=len(recent),
            failed=len(recent) - len(done),
            jobs_per_min=60 * len(recent) / max(1.0, now_s - since_s),
            prompt_tokens=sum(job.prompt for job in done),
            # A resumed job also finds what it generated before.
            cached_tokens=sum(min(job.cached, job.prompt) for job in done),
            completion_tokens=sum(job.completion for job in done),
            accepted_draft_tokens=sum(job.accepted_draft_tokens for job in done),
            queue_ms=by_bucket(job.queue_ms for job in whole),
            first_token_ms=by_bucket(job.first_token_ms for job in whole),
            e2e_ms=by_bucket(job.e2e_ms for job in done),
        )


def _done(job: EndedJob) -> _Done | None:
    """None of a failure."""
    usage, took = job.usage, job.timings
    if not usage or not took:
        return None
    return _Done(
        job.resumed,
        usage.prompt,
        usage.cached,
        usage.completion,
        usage.accepted_draft_tokens,
        took.queue_ms,
        took.first_token_ms,
        took.first_token_ms + took.decode_ms,
    )
