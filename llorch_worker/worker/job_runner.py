"""One job in a worker, from its claim to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import redis
from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker import claims, journal
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.journal import FIRST_PAGE
from llorch_worker.contract import (
    TERMINAL_EVENTS,
    Cancelled,
    Event,
    GenerationResult,
    InternalError,
    LlorchError,
)
from llorch_worker.worker.active_jobs import ActiveJob, ActiveJobs
from llorch_worker.worker.publisher import Publisher
from llorch_worker.worker.resident_engine import ResidentEngine
from llorch_worker.worker.submitter import Submitter

logger = get_logger(__name__)

HAND_BACK_FLUSH_S = 5.0
"""How long a job that goes back to its queue waits for its tokens to be journalled. What is not,
the next worker computes again."""
ASK_AFTER_S = 0.5
"""A job that begins so long after its claim asks whether it was cancelled meanwhile."""


class HandedBack(Exception):
    """The job cannot run here, or was stopped here, and is to run elsewhere; it has not ended."""


class JobRunner:
    """Runs jobs in the engine, a call to ``generate`` on a thread of its own for each."""

    def __init__(
        self,
        engine: ResidentEngine,
        running: ActiveJobs,
        publisher: Publisher,
        client: redis.Redis,
        *,
        hostname: str,
        key_ttl_s: int,
        is_cancelled: Callable[[str], bool],
        end_worker: Callable[[], None],
    ) -> None:
        """``key_ttl_s``: how long idempotency keys are remembered. ``is_cancelled`` asks Redis
        about a job by its id; ``end_worker`` is called once the engine can run nothing more."""
        self._engine = engine
        self._running = running
        self._publisher = publisher
        self._redis = client
        self._submitter = Submitter(engine, client, hostname=hostname, key_ttl_s=key_ttl_s)
        self._is_cancelled = is_cancelled
        self._end_worker = end_worker
        self._leaving = False

    def generate(
        self,
        job_id: str,
        arguments: Sequence[Any],
        fields: Mapping[str, Any],
        *,
        enqueued_at: float | None = None,
    ) -> GenerationResult:
        """Runs one claimed job and waits for its end. Tokens that are not in its stream by then are
        left to whoever stores the result: they go there in the same step.

        ``enqueued_at``: unix time in s at which the producer sent the job, where that is known.

        Raises:
            LlorchError: refused or failed; Cancelled where it was cancelled.
            HandedBack: it is to run again, or another worker has it already.
        """
        job, new = self._running.enter(job_id)
        if not new:
            # The same job twice: one run, and both deliveries end with it.
            return job.outcome.result()
        try:
            result = self._run(job, arguments, fields, enqueued_at)
        except BaseException as error:
            job.outcome.set_exception(error)
            raise
        else:
            job.outcome.set_result(result)
            return result
        finally:
            self._running.leave(job)

    def leave(self) -> None:
        """Every job that is not in the engine yet goes back to its queue from now on."""
        self._leaving = True

    def _run(
        self,
        job: ActiveJob,
        arguments: Sequence[Any],
        fields: Mapping[str, Any],
        enqueued_at: float | None,
    ) -> GenerationResult:
        claim = HELD_CLAIMS.get(job.id)
        if claim is None:
            raise InternalError("the job reached this worker without a claim")
        try:
            page = FIRST_PAGE if claim.first else journal.read(self._redis, job.id)
        except RedisError as error:
            logger.warning("cannot read the journal of job %s: %s", job.id, error)
            raise HandedBack from None
        self._publisher.open(claim, page.next_entry)
        try:
            self._check_wanted(job, claim)
            self._check_healthy()
            generation = self._submitter.submit(
                claim, arguments, fields, enqueued_at, page.journal, partial(self._tell, job.id)
            )
            job.attach(generation)
            try:
                result = generation.result()
            except LlorchError as error:
                if self._goes_on_elsewhere(job, error):
                    self._flush(job)
                else:
                    self._leave_entries(job, claim)
                raise
            self._leave_entries(job, claim)
            return result
        except Cancelled:
            if job.handed_back:
                raise HandedBack from None
            raise
        except InternalError:
            if self._engine.healthy:
                raise
            self._abandon(claim)
            raise HandedBack from None
        finally:
            self._publisher.close_job(job.id)
            if not self._engine.healthy:
                self._end_broken()

    def _end_broken(self) -> None:
        """Every job would fail here; the process ends and another takes over."""
        logger.critical("the engine is broken; the worker ends, its jobs resume elsewhere")
        self._end_worker()

    def _abandon(self, claim: Claim) -> None:
        """The engine broke under this job, or beside it: its claim ends as if the whole worker had
        died, so the attempt counts, and a job that breaks engines is kept apart and ends."""
        try:
            claims.lapse(self._redis, claim)
        except RedisError as error:
            logger.warning("the lease of job %s is left to lapse: %s", claim.job_id, error)

    def _goes_on_elsewhere(self, job: ActiveJob, error: LlorchError) -> bool:
        """Whether a job whose generation ended with ``error`` has not ended by that."""
        match error:
            case Cancelled():
                return job.handed_back
            case InternalError():
                return not self._engine.healthy
        return False

    def _flush(self, job: ActiveJob) -> None:
        """Puts all that is unwritten into the journal."""
        if not self._publisher.flush(job.id, self._patience(job)):
            raise HandedBack

    def _leave_entries(self, job: ActiveJob, claim: Claim) -> None:
        """What is unwritten is for whoever stores the result."""
        entries = self._publisher.take(job.id, self._patience(job))
        if entries is None:
            raise HandedBack
        HELD_CLAIMS.leave_entries(claim, entries)

    def _patience(self, job: ActiveJob) -> Callable[[], bool]:
        """Waits for Redis as long as it takes, so that a result never precedes its tokens."""
        give_up_s: float | None = None

        def give_up() -> bool:
            nonlocal give_up_s
            if (job.leaving or not self._engine.healthy) and give_up_s is None:
                give_up_s = time.monotonic() + HAND_BACK_FLUSH_S
            return give_up_s is not None and time.monotonic() > give_up_s

        return give_up

    def _tell(self, job_id: str, event: Event) -> None:
        # The last event is written with the result, in one step.
        if isinstance(event, TERMINAL_EVENTS):
            self._publisher.expect_end(job_id)
        else:
            self._publisher.append(job_id, event)

    def _check_healthy(self) -> None:
        # Not for a job that is in the engine: it may be what broke it, and its attempt counts.
        if not self._engine.healthy:
            self._end_broken()
            raise HandedBack

    def _check_wanted(self, job: ActiveJob, claim: Claim) -> None:
        if job.handed_back or self._leaving:
            raise HandedBack
        if job.cancelled or self._was_cancelled(claim):
            raise Cancelled("the job was cancelled before it ran")

    def _was_cancelled(self, claim: Claim) -> bool:
        """Whether a cancel came before the job was known here.

        The claim tells of those before it. One in the moments between is found by the first write;
        only a job that has waited here since must ask.
        """
        waited = time.monotonic() - claim.taken_s > ASK_AFTER_S
        return claim.cancelled or (waited and self._is_cancelled(claim.job_id))
