"""The jobs that ended: how long each took, and none of its content. Everything that counts or shows
ended jobs takes them from here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import stored
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.queues import model_of
from llorch_worker.contract import Cancelled, JobResult, LlorchError, Timings, Usage
from llorch_worker.contract.result import FinishReason

MOST_ENDED_JOBS = 200
KEEP_S = 24 * 3600


class EndedJob(BaseModel):
    """A job that a worker ended. ``usage`` and ``timings`` are those of a success."""

    # Workers and gateways of neighbouring versions read each other's entries.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    id: str
    model: str
    worker: str
    attempts: int
    ended_at: float
    """Unix time by the worker's clock."""
    outcome: FinishReason | Literal["failed", "cancelled"]
    error: str | None = None
    """The code of a failure."""
    usage: Usage | None = None
    timings: Timings | None = None
    resumed: bool = False
    """Whether it continued where an earlier attempt ended. Then ``timings`` are of the last
    attempt, but for their sum."""
    trace_id: str | None = Field(None, exclude=True)
    """The trace that the job belongs to; for this process' observers only."""


class EndedJobs:
    """The jobs that this process ends: each is reported to all observers and, later, to Redis.

    Thread-safe. The worker's announcer publishes them every few seconds, so they cost a job no
    round trip. Those of a worker that is killed in between are missing from the list.
    """

    def __init__(self) -> None:
        self._observers: tuple[Callable[[EndedJob], None], ...] = ()
        self._untold: deque[EndedJob] = deque(maxlen=MOST_ENDED_JOBS)

    def observe(self, observer: Callable[[EndedJob], None]) -> None:
        """Calls ``observer`` with each job once its end is stored, in the thread that ended it.

        It must neither wait nor raise: Celery would take its error for the job's.
        """
        self._observers += (observer,)

    def note(
        self,
        claim: Claim,
        worker: str,
        end: JobResult | LlorchError,
        trace_id: str | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        """Notes a job whose end this process has just stored."""
        fields = {
            "id": claim.job_id,
            "model": model_of(claim.list_key),
            "worker": worker,
            "attempts": claim.attempt,
            "ended_at": time.time(),
            "resumed": resumed,
            "trace_id": trace_id,
        }
        match end:
            case JobResult():
                ended = EndedJob(**fields, outcome=end.ended, usage=end.usage, timings=end.timings)
            case Cancelled():
                ended = EndedJob(**fields, outcome="cancelled")
            case _:
                ended = EndedJob(**fields, outcome="failed", error=end.code)
        self.tell(ended)

    def tell(self, ended: EndedJob) -> None:
        """Reports a job of which no claim is held."""
        self._untold.append(ended)
        for observer in self._observers:
            observer(ended)

    def publish(self, client: Redis) -> None:
        """Adds them to the list in Redis. A call that raises ``RedisError`` loses its jobs."""
        ended = [self._untold.popleft().model_dump_json() for _ in range(len(self._untold))]
        if not ended:
            return
        with client.pipeline() as pipe:
            pipe.lpush(keys.ENDED_JOBS, *ended)
            pipe.ltrim(keys.ENDED_JOBS, 0, MOST_ENDED_JOBS - 1)
            pipe.expire(keys.ENDED_JOBS, KEEP_S)
            pipe.execute()


ENDED_JOBS = EndedJobs()
"""One per process: result backends, which Celery creates, all note here."""


def ended_jobs(client: Redis, limit: int) -> list[EndedJob]:
    """The last ``limit`` of all workers, about newest first."""
    documents = client.lrange(keys.ENDED_JOBS, 0, limit - 1)
    jobs = [stored.read(EndedJob, document) for document in documents]
    return [job for job in jobs if job is not None]
