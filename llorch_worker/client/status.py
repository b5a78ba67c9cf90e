"""The status of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llorch_worker.broker.jobs.results import StoredState
from llorch_worker.broker.waiting.waiting import Position
from llorch_worker.contract import Cancelled, ErrorDocument, JobResult

JobState = Literal["unknown", "queued", "running", "cancelling", "succeeded", "failed", "cancelled"]
"""``unknown``: Redis has no trace of this id. Another producer's job is unknown until a worker
takes it. ``cancelling``: a cancel was requested and the job has not ended yet."""


@dataclass(frozen=True)
class JobStatus:
    """A snapshot. ``worker`` is known once the job has started, ``error`` once it has failed,
    ``result`` once it has succeeded."""

    id: str
    state: JobState
    worker: str | None = None
    position: Position | None = None
    """Where it waits; None if it does not wait, or where is not known."""
    error: ErrorDocument | None = None
    result: JobResult | None = None
    sent_at_s: float | None = None
    """Unix time of the enqueueing, by Redis' clock; None if another producer sent the job."""
    forgotten: bool = False
    """The job has ended, and its result was deleted, as Celery's ``forget()`` does. Workers drop a
    message that repeats its id."""

    @property
    def ended(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled")


def job_status(
    job_id: str, stored: StoredState, *, waits: bool, cancelling: bool, ended: bool
) -> JobStatus:
    """The status that follows from the stored state and the marks in Redis.

    ``waits``: for its ETA or for a worker, perhaps not for the first time. ``ended``: its record
    says so, whatever has become of its result.
    """
    match stored.end:
        case JobResult() as result:
            return JobStatus(job_id, "succeeded", worker=stored.worker, result=result)
        case Cancelled():
            return JobStatus(job_id, "cancelled")
        case None:
            pass
        case error:
            return JobStatus(job_id, "failed", error=error.document())
    if cancelling:
        return JobStatus(job_id, "cancelling", worker=stored.worker)
    if waits:
        return JobStatus(job_id, "queued")
    if stored.status != "PENDING":
        return JobStatus(job_id, "running", worker=stored.worker)
    return JobStatus(job_id, "unknown", forgotten=ended)
