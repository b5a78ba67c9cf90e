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

from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect
from llorch_worker.broker.registry import WorkerCard
from llorch_worker.contract import (
    TERMINAL_EVENTS,
    Cancelled,
    CancelledEvent,
    Event,
    Failed,
    Fault,
    GenerationRequest,
    GenerationResult,
    InternalError,
    InvalidRequest,
    LlorchError,
    OutOfMemory,
    describe,
)
from llorch_worker.settings import Settings
from llorch_worker.worker.announcer import Announcer
from llorch_worker.worker.cancellation import CancelListener
from llorch_worker.worker.publisher import Publisher
from llorch_worker.worker.running import RunningJob, RunningJobs

logger = get_logger(__name__)

FLUSH_TIMEOUT_S = 5.0
"""How long a job's end waits for its last events to be written before its result is stored. Past
it (Redis is away) the result may come first."""
CLOSE_TIMEOUT_S = 10.0


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
        on_event: Callable[[Event], None] | None = None,
    ) -> ResidentGeneration: ...
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
    ) -> None:
        """``on_broken`` is called once the engine can run nothing more."""
        self.engine = engine
        self.running = RunningJobs()
        self._settings = settings
        self._hostname = hostname
        self._on_broken = on_broken
        self._started_at = time.time()
        self._redis = connect(settings.redis_url)
        self.publisher = Publisher(
            self._redis,
            flush_interval_ms=settings.flush_interval_ms,
            stream_ttl_s=settings.stream_ttl_s,
        )
        self._listener = CancelListener(self._redis, self.running)
        self._announcer = Announcer(self._redis, hostname, self._card)

    def start(self) -> None:
        self.publisher.start()
        self._listener.start()
        self._announcer.start()

    def close(self) -> None:
        """Ends the engine and the threads; jobs must have ended before."""
        self._announcer.close()
        self._listener.close()
        self.engine.close()
        self.publisher.close(CLOSE_TIMEOUT_S)
        self._redis.close()

    def cancel(self, job_id: str) -> None:
        """Cancels the job if it is here, within one engine step."""
        self.running.cancel(job_id)

    def hand_back(self, job_id: str) -> None:
        """Stops the job if it is here; :class:`HandedBack` comes out of its ``generate``."""
        self.running.hand_back(job_id)

    def stats(self) -> dict[str, Any]:
        """The engine's figures as plain JSON."""
        return dataclasses.asdict(self.engine.stats())

    def generate(
        self,
        job_id: str,
        arguments: Sequence[Any],
        fields: Mapping[str, Any],
        *,
        attempt: int = 1,
        queued_at: float | None = None,
    ) -> GenerationResult:
        """Runs one job and waits for its end. The terminal event is written before this returns,
        so a reader who sees it finds the result, or will in a moment.

        Raises:
            LlorchError: refused or failed; Cancelled where it was cancelled.
            HandedBack: it is to run again.
        """
        job, new = self.running.enter(job_id)
        if not new:
            # The same message twice: one run, and both deliveries end with it.
            return job.outcome.result()
        try:
            result = self._run(job, arguments, fields, attempt, queued_at)
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
        attempt: int,
        queued_at: float | None,
    ) -> GenerationResult:
        try:
            generation = self._submit(job, arguments, fields, attempt, queued_at)
        except Cancelled:
            self._end(job, CancelledEvent())
            raise
        except LlorchError as error:
            self._end(job, Failed(error=error.document()))
            raise
        job.attach(generation)
        try:
            return generation.result()
        except Cancelled:
            if job.handed_back:
                self.publisher.forget(job.id)
                raise HandedBack from None
            raise
        finally:
            self.publisher.flush(job.id, FLUSH_TIMEOUT_S)
            if not self.engine.healthy:
                # Every job would fail here; the process ends and another takes over.
                self._on_broken()

    def _submit(
        self,
        job: RunningJob,
        arguments: Sequence[Any],
        fields: Mapping[str, Any],
        attempt: int,
        queued_at: float | None,
    ) -> ResidentGeneration:
        def on_event(event: Event) -> None:
            # A job that is handed back has not ended; its cancelled event is our own doing.
            if not (job.handed_back and isinstance(event, TERMINAL_EVENTS)):
                self.publisher.append(job.id, event)

        try:
            if not self.engine.healthy:
                self._on_broken()
                raise HandedBack
            request = _request(arguments, fields)
            self._check_idempotency(request, job.id)
            if job.cancelled or self._listener.is_cancelled(job.id):
                raise Cancelled("the job was cancelled before it ran")
            return self.engine.submit(
                request,
                job_id=job.id,
                worker=self._hostname,
                attempt=attempt,
                queued_at=queued_at,
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

    def _end(self, job: RunningJob, event: Event) -> None:
        self.publisher.append(job.id, event)
        self.publisher.flush(job.id, FLUSH_TIMEOUT_S)

    def _card(self) -> WorkerCard:
        stats = self.stats()
        return WorkerCard(
            hostname=self._hostname,
            pid=os.getpid(),
            model=self.engine.model_name,
            max_context=self.engine.max_context,
            max_sequences=self.engine.max_sequences,
            device=stats["device"],
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
