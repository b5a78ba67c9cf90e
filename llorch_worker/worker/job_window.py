"""The jobs that ended in this worker in the last minutes."""

from __future__ import annotations

import time
from collections import deque

from llorch_worker.broker.fleet.recent_jobs import WINDOW_S, RecentJobs, by_bucket
from llorch_worker.broker.jobs.ended_jobs import EndedJob

MOST_JOBS = 2_000
"""A worker that ends more in the window reports the last ones."""


class JobWindow:
    """Jobs' threads add to it; the announcer's reads it. Adding a job only appends a tuple."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._ended: deque[tuple[float, EndedJob]] = deque(maxlen=MOST_JOBS)

    def add(self, job: EndedJob) -> None:
        if job.outcome != "cancelled":
            self._ended.append((time.monotonic(), job))

    def read(self) -> RecentJobs:
        now_s = time.monotonic()
        # Copied in one step: other threads append meanwhile.
        ended = tuple(self._ended)
        since_s = max(self._began_s, now_s - WINDOW_S)
        if len(ended) == MOST_JOBS:
            since_s = max(since_s, ended[0][0])
        recent = [job for at_s, job in ended if at_s >= since_s]
        done = [(job.usage, job.timings) for job in recent if job.usage and job.timings]
        # Nobody knows when a resumed job began, but when it ended.
        whole = [job.timings for job in recent if job.timings and not job.resumed]
        return RecentJobs(
            ended=len(recent),
            failed=len(recent) - len(done),
            jobs_per_min=60 * len(recent) / max(1.0, now_s - since_s),
            prompt_tokens=sum(usage.prompt for usage, _ in done),
            # A resumed job also finds what it generated before.
            cached_tokens=sum(min(usage.cached, usage.prompt) for usage, _ in done),
            completion_tokens=sum(usage.completion for usage, _ in done),
            accepted_draft_tokens=sum(usage.accepted_draft_tokens for usage, _ in done),
            queue_ms=by_bucket(took.queue_ms for took in whole),
            first_token_ms=by_bucket(took.first_token_ms for took in whole),
            e2e_ms=by_bucket(took.first_token_ms + took.decode_ms for _, took in done),
        )
