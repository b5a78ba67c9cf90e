"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from celery.utils import uuid

from llorch_worker.broker import keys, registry
from llorch_worker.broker.celery_app import producer_app
from llorch_worker.broker.connection import broker_errors, connect, subscribe
from llorch_worker.broker.queues import route
from llorch_worker.broker.results import StoredState, decode_state
from llorch_worker.client.admission import Admission
from llorch_worker.client.status import JobStatus, job_status
from llorch_worker.client.stream import (
    FROM_THE_START,
    READ_COUNT,
    WATCH_RENEW_S,
    WATCH_TTL_S,
    StreamCursor,
    StreamEntry,
)
from llorch_worker.contract import TASK_NAME, GenerationRequest, GenerationResult, LlorchError
from llorch_worker.settings import Settings

RESULT_POLL_S = 2.0
"""A result is announced by pub/sub; this often it is looked for all the same."""


class Client:
    """Sends jobs to the workers behind one Redis. Safe to share between threads.

    ``settings`` is a :class:`Settings` or just the URL of the Redis; ``model`` is what requests
    without a model are for. Every method raises :class:`BrokerUnavailable` within seconds where
    Redis does not answer.
    """

    def __init__(self, settings: Settings | str | None = None, *, model: str | None = None) -> None:
        match settings:
            case None:
                settings = Settings()
            case str():
                settings = Settings(redis_url=settings)
        self.settings = settings
        self.model = model
        self.redis = connect(settings.redis_url)
        self._app = producer_app(settings.redis_url)
        self._admission = Admission(self.redis)

    def submit(self, request: GenerationRequest | None = None, /, **fields: Any) -> Job:
        """Enqueues one job, given as a request or as its fields.

        With an ``idempotency_key`` that was used before for this model, nothing is enqueued and
        the first job comes back.

        Raises:
            InvalidRequest, ContextLengthExceeded, ModelNotServed: nothing was enqueued.
        """
        if request is None:
            request = GenerationRequest(**fields)
        elif fields:
            raise TypeError("submit() takes a request or its fields, not both")
        with broker_errors(self.settings.redis_url):
            model = self._admission.admit(request, self.model)
            job_id = uuid()
            if request.idempotency_key is not None:
                first = self._first_job(keys.idempotency(model, request.idempotency_key), job_id)
                if first != job_id:
                    return Job(self, first)
            self._send(request, model, job_id)
        return Job(self, job_id)

    def job(self, job_id: str) -> Job:
        """A job that was sent before, by whomever."""
        return Job(self, job_id)

    def models(self) -> list[registry.ModelCard]:
        """Every model ever served here, by name."""
        with broker_errors(self.settings.redis_url):
            return [card for _, card in sorted(registry.models(self.redis).items())]

    def workers(self) -> list[registry.WorkerCard]:
        """The workers that are alive now, by hostname."""
        with broker_errors(self.settings.redis_url):
            return registry.workers(self.redis)

    def close(self) -> None:
        self._app.close()
        self.redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _first_job(self, key: str, job_id: str) -> str:
        ttl_s = self.settings.result_ttl_s
        if self.redis.set(key, job_id, nx=True, ex=ttl_s):
            return job_id
        # The key can expire between the two commands; then this job is the first.
        return str(self.redis.get(key) or job_id)

    def _send(self, request: GenerationRequest, model: str, job_id: str) -> None:
        to = route(model, request.priority)
        now = time.time()
        self.redis.set(keys.sent(job_id), now, ex=self.settings.result_ttl_s)
        try:
            self._app.send_task(
                TASK_NAME,
                kwargs=request.wire() | {"model": model},
                task_id=job_id,
                queue=to.queue,
                priority=to.priority,
                headers={"llorch_enqueued_at": now},
                # Celery would put the prompt into the headers for logs and monitors.
                argsrepr="()",
                kwargsrepr=request.summary(),
            )
        except BaseException:
            if request.idempotency_key is not None:
                self.redis.delete(keys.idempotency(model, request.idempotency_key))
            raise


class Job:
    """One job, by its id, which is also Celery's task id."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.id = job_id
        self._client = client
        self._redis = client.redis
        self._url = client.settings.redis_url

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def stream(
        self, from_id: str = FROM_THE_START, timeout: float | None = None
    ) -> Iterator[StreamEntry]:
        """Events as they come, from the first or from after ``from_id``, up to the terminal one.

        Any number of readers may follow a job, each from where it wants. A reader that was cut
        off resumes with ``from_id=entry.entry_id`` and misses nothing. The terminal event may
        come a moment before :meth:`result` finds the result.

        Raises:
            TimeoutError: nothing new came for ``timeout`` seconds.
        """
        cursor = StreamCursor(self.id, from_id)
        watched_at_s = float("-inf")
        heard_at_s = time.monotonic()
        block_ms = None
        while not cursor.ended:
            with broker_errors(self._url):
                if time.monotonic() - watched_at_s > WATCH_RENEW_S:
                    self._redis.set(keys.watchers(self.id), 1, ex=WATCH_TTL_S)
                    watched_at_s = time.monotonic()
                reply = self._read(cursor, block_ms)
                block_ms = cursor.block_ms(timeout, time.monotonic() - heard_at_s)
                ended = None if reply else self._state()
                if ended is not None and ended.end is not None:
                    # The last events may have come between the two commands.
                    reply = self._read(cursor, None)
            if reply:
                heard_at_s = time.monotonic()
                yield from cursor.accept(reply)
            elif ended is not None and (closing := cursor.close_with(ended)) is not None:
                yield closing
            elif timeout is not None and time.monotonic() - heard_at_s > timeout:
                raise TimeoutError(f"no event of job {self.id} within {timeout} s")

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Waits for the end of the job.

        Raises:
            LlorchError: the job was refused or failed, as its own class; Cancelled after a cancel.
            TimeoutError: it has not ended within ``timeout`` seconds. It goes on.
        """
        with broker_errors(self._url):
            end = self._state().end
            if end is None:
                end = self._wait(timeout)
        if isinstance(end, LlorchError):
            raise end
        return end

    def cancel(self) -> bool:
        """Asks for a cancel; ``False`` if the job has ended already.

        A running job ends within one engine step, a queued one when its turn comes: it never runs.
        """
        with broker_errors(self._url):
            if self._state().end is not None:
                return False
            with self._redis.pipeline() as pipe:
                pipe.set(keys.cancel(self.id), 1, ex=self._client.settings.result_ttl_s)
                pipe.publish(keys.CANCEL_CHANNEL, self.id)
                pipe.execute()
            return True

    def status(self) -> JobStatus:
        """Where the job stands now."""
        with broker_errors(self._url):
            meta, sent, cancelling = self._redis.mget(
                keys.result(self.id), keys.sent(self.id), keys.cancel(self.id)
            )
        return job_status(
            self.id, decode_state(meta), sent=sent is not None, cancelling=cancelling is not None
        )

    def _read(self, cursor: StreamCursor, block_ms: int | None) -> Any:
        return self._redis.xread({cursor.key: cursor.last_id}, count=READ_COUNT, block=block_ms)

    def _state(self) -> StoredState:
        return decode_state(self._redis.get(keys.result(self.id)))

    def _wait(self, timeout: float | None) -> GenerationResult | LlorchError:
        give_up_s = None if timeout is None else time.monotonic() + timeout
        with subscribe(self._redis, keys.result(self.id)) as pubsub:
            while True:
                # Read after each message; the first one only confirms the subscription.
                end = self._state().end
                if end is not None:
                    return end
                left_s = RESULT_POLL_S
                if give_up_s is not None:
                    left_s = min(left_s, give_up_s - time.monotonic())
                    if left_s <= 0:
                        raise TimeoutError(f"job {self.id} has not ended within {timeout} s")
                pubsub.get_message(timeout=left_s)
