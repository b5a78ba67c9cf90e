"""The resident model and what surrounds it in a worker: jobs come in here and end here."""

from __future__ import annotations

import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker import claims, dead_letters, journal, keys
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.connection import connect
from llorch_worker.broker.held import HELD
from llorch_worker.broker.journal import FIRST_PAGE
from llorch_worker.broker.registry import WorkerCard
from llorch_worker.contract import (
    TERMINAL_EVENTS,
    Cancelled,
    Event,
    Fault,
    GenerationRequest,
    GenerationResult,
    InternalError,
    InvalidRequest,
    Journal,
    LlorchError,
    OutOfMemory,
    describe,
)
from llorch_worker.settings import Settings
from llorch_worker.worker.announcer import Announcer
from llorch_worker.worker.cancellation import CancelListener
from llorch_worker.worker.launcher import Place
from llorch_worker.worker.leases import RENEWALS_A_LEASE, LeaseKeeper
from llorch_worker.worker.publisher import Publisher
from llorch_worker.worker.residency_check import ResidencyCheck, violation
from llorch_worker.worker.running import RunningJob, RunningJobs

logger = get_logger(__name__)

HAND_BACK_FLUSH_S = 5.0
"""How long a job that goes back to its queue waits for its tokens to be journalled. What is not,
the next worker computes again."""
CLOSE_TIMEOUT_S = 10.0
ASK_AFTER_S = 0.5
"""A job that begins so long after its claim asks whether it was cancelled meanwhile."""


class HandedBack(Exception):
    """The job cannot run here, or was stopped here, and is to run elsewhere; it has not ended."""


class ResidentGeneration(Protocol):
    def cancel(self) -> None: ...
    def result(self, timeout: float | None = None) -> GenerationResult: ...


class ResidentEngine(Protocol):
    """What the worker needs of an engine; see :class:`llorch_worker.engine.Engine`."""

    model_name: str
    max_context: int
    max_sequences: int

    @property
    def healthy(self) -> bool: ...

    def submit(
        self,
        request: GenerationRequest,
        *,
        job_id: str | None = None,
        worker: str = "local",
        attempt: int = 1,
        queued_at: float | None = None,
        journal: Journal | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> ResidentGeneration: ...
    def stalled_for_s(self) -> float: ...
    def misplaced_tensors(self) -> tuple[str, ...]: ...
    def measure_memory(self) -> None: ...
    def stats(self) -> Any: ...
    def close(self) -> None: ...


class Residency:
    """One engine, the jobs in it, and the threads that speak with Redis for them.

    ``generate`` is called on the pool's threads, one call a job; ``cancel`` and ``hand_back`` from
    anywhere.
    """

    def __init__(
        self,
        engine: ResidentEngine,
        settings: Settings,
        hostname: str,
        on_broken: Callable[[], None],
        *,
        place: Place | None = None,
    ) -> None:
        """``on_broken`` is called once the engine can run nothing more. ``place``: the card that is
        this process' own, where it has one."""
        self.engine = engine
        self.running = RunningJobs()
        self._settings = settings
        self._hostname = hostname
        self._on_broken = on_broken
        self._leaving = False
        self._place = place or Place(str(engine.stats().device))
        self._started_at = time.time()
        self._redis = connect(settings.redis_url)
        self.publisher = Publisher(
            self._redis,
            flush_interval_ms=settings.flush_interval_ms,
            stream_ttl_s=settings.stream_ttl_s,
            on_lost=self.hand_back,
            on_cancelled=self.cancel,
        )
        self._leases_redis = connect(
            settings.redis_url, reply_timeout_s=settings.lease_s / RENEWALS_A_LEASE
        )
        self._leases = LeaseKeeper(
            self._leases_redis,
            HELD,
            lease_s=settings.lease_s,
            sweep_s=settings.sweep_s,
            direct_grace_s=settings.direct_grace_s,
            watchdog_s=settings.watchdog_s,
            stalled_for_s=engine.stalled_for_s,
            on_lost=self.hand_back,
        )
        self._listener = CancelListener(self._redis, self.running)
        self._announcer = Announcer(self._redis, hostname, self._card)
        self._check = ResidencyCheck(
            lambda: violation(engine, self._place), settings.residency_check_s, self.leave
        )

    def start(self) -> None:
        self.publisher.start()
        self._leases.start()
        self._listener.start()
        self._announcer.start()
        self._check.start()

    def close(self) -> None:
        """Ends the engine and the threads; jobs must have ended before."""
        self._check.close()
        self._announcer.close()
        self._listener.close()
        self.engine.close()
        self.publisher.close(CLOSE_TIMEOUT_S)
        self._leases.close()
        self._leases_redis.close()
        self._redis.close()

    def cancel(self, job_id: str) -> None:
        """Cancels the job if it is here, within one engine step."""
        self.running.cancel(job_id)

    def hand_back(self, job_id: str) -> None:
        """Stops the job if it is here; :class:`HandedBack` comes out of its ``generate``."""
        self.running.hand_back(job_id)

    def leave(self, reason: str) -> None:
        """Hands every job back, for other workers to go on with, and ends this one."""
        self._leaving = True
        logger.critical("%s; the worker ends, its jobs resume elsewhere", reason)
        for job_id in self.running.ids():
            self.hand_back(job_id)
        self._on_broken()

    def stats(self) -> dict[str, Any]:
        """The engine's figures as plain JSON. ``device`` is the card's own name, ``gpu3``: torch
        calls the only card that it sees cuda:0."""
        return dataclasses.asdict(self.engine.stats()) | {"device": self._place.name}

    def dead_letters(self) -> int | None:
        """How many wait at this Redis for an operator; None where Redis does not say."""
        try:
            return dead_letters.count(self._redis)
        except RedisError:
            return None

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
        job, new = self.running.enter(job_id)
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
            self.running.leave(job)

    def _run(
        self,
        job: RunningJob,
        arguments: Sequence[Any],
        fields: Mapping[str, Any],
        enqueued_at: float | None,
    ) -> GenerationResult:
        claim = HELD.get(job.id)
        if claim is None:
            raise InternalError("the job reached this worker without a claim")
        try:
            page = FIRST_PAGE if claim.first else journal.read(self._redis, job.id)
        except RedisError as error:
            logger.warning("cannot read the journal of job %s: %s", job.id, error)
            raise HandedBack from None
        self.publisher.open(claim, page.next_entry)
        try:
            generation = self._submit(job, claim, arguments, fields, enqueued_at, page.journal)
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
            if self.engine.healthy:
                raise
            self._abandon(claim)
            raise HandedBack from None
        finally:
            self.publisher.close_job(job.id)
            if not self.engine.healthy:
                self._end_broken()

    def _end_broken(self) -> None:
        """Every job would fail here; the process ends and another takes over."""
        logger.critical("the engine is broken; the worker ends, its jobs resume elsewhere")
        self._on_broken()

    def _abandon(self, claim: Claim) -> None:
        """The engine broke under this job, or beside it: its claim ends as if the whole worker had
        died, so the attempt counts, and a job that breaks engines is kept apart and ends."""
        try:
            claims.lapse(self._redis, claim)
        except RedisError as error:
            logger.warning("the lease of job %s is left to lapse: %s", claim.job_id, error)

    def _goes_on_elsewhere(self, job: RunningJob, error: LlorchError) -> bool:
        """Whether a job whose generation ended with ``error`` has not ended by that."""
        match error:
            case Cancelled():
                return job.handed_back
            case InternalError():
                return not self.engine.healthy
        return False

    def _flush(self, job: RunningJob) -> None:
        """Puts all that is unwritten into the journal."""
        if not self.publisher.flush(job.id, self._patience(job)):
            raise HandedBack

    def _leave_entries(self, job: RunningJob, claim: Claim) -> None:
        """What is unwritten is for whoever stores the result."""
        entries = self.publisher.take(job.id, self._patience(job))
        if entries is None:
            raise HandedBack
        HELD.leave_entries(claim, entries)

    def _patience(self, job: RunningJob) -> Callable[[], bool]:
        """Waits for Redis as long as it takes, so that a result never precedes its tokens."""
        give_up_s: float | None = None

        def give_up() -> bool:
            nonlocal give_up_s
            if (job.leaving or not self.engine.healthy) and give_up_s is None:
                give_up_s = time.monotonic() + HAND_BACK_FLUSH_S
            return give_up_s is not None and time.monotonic() > give_up_s

        return give_up

    def _submit(
        self,
        job: RunningJob,
        claim: Claim,
        arguments: Sequence[Any],
        fields: Mapping[str, Any],
        enqueued_at: float | None,
        known: Journal,
    ) -> ResidentGeneration:
        def on_event(event: Event) -> None:
            # The last event is written with the result, in one step.
            if isinstance(event, TERMINAL_EVENTS):
                self.publisher.expect_end(job.id)
            else:
                self.publisher.append(job.id, event)

        try:
            if not self.engine.healthy:
                self._end_broken()
                raise HandedBack
            request = _request(arguments, fields)
            self._check_idempotency(request, job.id)
            if job.handed_back or self._leaving:
                raise HandedBack
            if job.cancelled or self._was_cancelled(claim):
                raise Cancelled("the job was cancelled before it ran")
            return self.engine.submit(
                request,
                job_id=job.id,
                worker=self._hostname,
                attempt=claim.attempt,
                queued_at=_queued_at(claim, enqueued_at),
                journal=known,
                on_event=on_event,
            )
        except (LlorchError, HandedBack):
            raise
        except MemoryError:
            raise OutOfMemory("the worker had no memory for this job") from None
        except BaseException as error:  # noqa: BLE001 - any defect must end its job
            # Its message may quote the prompt, so only type and place are shown.
            place = "".join(traceback.format_tb(error.__traceback__))
            logger.error("job %s met a defect: %s\n%s", job.id, type(error).__name__, place)
            raise InternalError(f"a defect of the worker: {type(error).__name__}") from None

    def _was_cancelled(self, claim: Claim) -> bool:
        """Whether a cancel came before the job was known here.

        The claim tells of those before it. One in the moments between is found by the first write;
        only a job that has waited here since must ask.
        """
        waited = time.monotonic() - claim.taken_s > ASK_AFTER_S
        return claim.cancelled or (waited and self._listener.is_cancelled(claim.job_id))

    def _check_idempotency(self, request: GenerationRequest, job_id: str) -> None:
        """Our client never sends a second job for a key; what another producer sends is refused."""
        if request.idempotency_key is None:
            return
        key = keys.idempotency(self.engine.model_name, request.idempotency_key)
        try:
            if self._redis.set(key, job_id, nx=True, ex=self._settings.result_ttl_s):
                return
            first = str(self._redis.get(key) or job_id)
        except RedisError:
            return
        if first != job_id:
            fault = Fault(
                field="idempotency_key", rule=f"was used by job {first}", got="the same key again"
            )
            raise InvalidRequest.from_faults([fault])

    def _card(self) -> WorkerCard:
        stats = self.stats()
        return WorkerCard(
            hostname=self._hostname,
            pid=os.getpid(),
            model=self.engine.model_name,
            max_context=self.engine.max_context,
            max_sequences=self.engine.max_sequences,
            queue_limit=self._settings.queue_limit,
            device=self._place.name,
            started_at=self._started_at,
            last_seen=time.time(),
            engine=stats,
        )


def _request(arguments: Sequence[Any], fields: Mapping[str, Any]) -> GenerationRequest:
    if arguments:
        fault = Fault(
            field="args", rule="must be empty: fields go by name", got=describe(arguments)
        )
        raise InvalidRequest.from_faults([fault])
    return GenerationRequest(**fields)


def _queued_at(claim: Claim, enqueued_at: float | None) -> float:
    """When the job was enqueued, as unix time in s of this machine's clock.

    The wait is measured on Redis' clock, so that a worker whose own is off neither cuts deadlines
    short nor stretches them. Where a producer did not say when, the first claim counts.
    """
    claimed_s = claim.claimed_ms / 1e3
    since_s = claim.first_claimed_ms / 1e3 if enqueued_at is None else enqueued_at
    return time.time() - max(0.0, claimed_s - since_s)
