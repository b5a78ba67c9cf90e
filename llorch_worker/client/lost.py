"""Noticing that Redis has lost a job, by FLUSHALL for example, or a restart without persistence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llorch_worker.broker import keys
from llorch_worker.contract import JobLost

GRACE_S = 2.0


def queue_look(pipe: Any, job_id: str) -> Any:
    """Asks for a job's stored state and its marks."""
    pipe.get(keys.result(job_id))
    return pipe.hmget(keys.job(job_id), "state", "sent")


def is_found(document: str | None, marks: Sequence[str | None]) -> bool:
    """Whether an end of the job is there, or may come. A result may have been deleted."""
    state, sent = marks
    return document is not None or ((state or sent) is not None and state != "ended")


class Trace:
    """What one reader knows of whether Redis still has the job.

    A job that runs is put back by its worker within a lease. ``known``: the job was enqueued; else
    it is known once there is a trace. A stock producer's job leaves none until a worker takes it.
    """

    def __init__(self, job_id: str, lease_s: float, *, known: bool) -> None:
        self._job_id = job_id
        self._patience_s = lease_s + GRACE_S
        self._known = known
        self._missing_since_s: float | None = None

    def note(self, found: bool) -> None:
        """Notes a reply of Redis. Raises ``JobLost`` if there was no trace for a lease."""
        now_s = time.monotonic()
        if found:
            self._known, self._missing_since_s = True, None
        elif self._known:
            self._missing_since_s = self._missing_since_s or now_s
            if now_s - self._missing_since_s >= self._patience_s:
                raise JobLost(f"Redis has lost job {self._job_id}; submit it again")
