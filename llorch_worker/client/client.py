"""The synchronous client."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Generic, Self, cast, overload

from celery.utils import uuid
from redis.client import PubSub

from llorch_worker.broker import keys
from llorch_worker.broker.celery.producer import producer_app
from llorch_worker.broker.connections.connection import (
    broker_errors,
    close_idle,
    connect,
    subscribe,
)
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.affinity import Affinity
from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.broker.jobs.results import StoredState, decode_state
from llorch_worker.broker.scripts import database
from llorch_worker.broker.waiting.enqueue import enqueue
from llorch_worker.broker.waiting.waiting import position
from llorch_worker.client.admission import NO_WORKER, Admission
from llorch_worker.client.lost import Trace
from llorch_worker.client.status import JobStatus, job_status
from llorch_worker.client.stream import (
    AWAITED_S,
    FROM_THE_START,
    READ_COUNT,
    RECHECK_S,
    Position,
    StreamCursor,
    StreamEntry,
)
from llorch_worker.contract import (
    EmbeddingResult,
    EmbedRequest,
    GenerationRequest,
    InvalidRequest,
    JobRequest,
    JobResult,
    LlorchError,
    RerankRequest,
    RerankResult,
    ScoreRequest,
    ScoreResult,
    request_digest,
)
from llorch_worker.contract.generation_config import with_generation_config
from llorch_worker.contract.kinds import Result
from llorch_worker.settings import Settings
from llorch_worker.telemetry.traces.publishing import publishing

RESULT_POLL_S = 2.0
"""Results are announced by pub/sub. A reader also looks for its result this often."""


class Client:
    """Sends jobs to the workers behind one Redis. Thread-safe.

    ``settings`` is a :class:`Settings` or the URL of the Redis; ``model`` is the default model of
    requests. Every method raises :class:`BrokerUnavailable` within seconds if Redis does not
    answer, and ``RuntimeError`` once the client is closed, even in threads that already wait.
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
        self._admission = Admission(self.redis, settings.redis_url)
        self._affinity = Affinity(self.redis)
        self._closed = False

    @overload
    def submit(self, request: GenerationRequest | None = None, /, **fields: Any) -> Job: ...

    @overload
    def submit(self, request: JobRequest, /, **options: Any) -> Job[Any]: ...

    def submit(
        self,
        request: JobRequest | None = None,
        /,
        *,
        job_id: str | None = None,
        owner: str = "",
        stream: bool = False,
        digest: str | None = None,
        **fields: Any,
    ) -> Job[Any]:
        """Enqueues one job, given as a request or as the fields of one.

        ``job_id`` is a new id, if the caller must know it before; by default one is drawn.

        ``owner`` is the name of a gateway's key, which may read and cancel the job over HTTP.

        What the request does not name is as the model's makers set it, if its files say so:
        ``job.generation_config``, unless ``LLORCH_GENERATION_CONFIG`` is ``none``.

        ``stream``: you are going to follow the job at once. Then its events come one for each
        token from the first on; otherwise those that no one reads yet are written together.

        If this model already has a job with the same ``idempotency_key``, nothing is enqueued and
        that job is returned. The key is free again once that job has ended with a retriable error.
        ``digest`` stands for the request there, if it is only a part of what has the key.

        Raises:
            InvalidRequest, ContextLengthExceeded: nothing was enqueued. IdempotencyKeyReused if
                the first request with the key was another one.
            ModelNotServed: nothing was enqueued; no worker has ever served the model.
            QueueFull: nothing was enqueued; the model's queue is full, or Redis is out of memory.
                Try again later.
        """
        if "worker" in fields:
            raise InvalidRequest.from_faults([NO_WORKER])
        if request is None:
            request = GenerationRequest(**fields)
        elif not isinstance(request, JobRequest):
            raise TypeError(
                "submit() takes a request, or the fields of a GenerationRequest by name, such as "
                f"submit(prompt=...) or submit(messages=[...]), not {type(request).__name__}"
            )
        elif fields:
            raise TypeError("submit() takes a request or its fields, not both")
        digest = digest or request_digest([request])
        with self._in_use():
            model = self._admission.card(request.model or self.model)
            takes_config = self.settings.generation_config == "auto"
            if takes_config and isinstance(request, GenerationRequest):
                request = with_generation_config(request, model.generation_config)
            self._admission.admit(request, model)
            job_id = job_id or uuid()
            placed = self.settings.placement
            places = self._affinity.candidates(request, model.name) if placed else ()
            with publishing(model.name, job_id) as headers:
                enqueued = enqueue(
                    self.redis,
                    self._app,
                    request,
                    model=model,
                    job_id=job_id,
                    places=places,
                    headers=headers,
                    owner=owner,
                    awaited_s=AWAITED_S if stream else 0,
                    digest=digest,
                )
        job = self.job(enqueued, known=True)
        if enqueued == job_id and isinstance(request, GenerationRequest):
            job.generation_config = request.taken_config
        return job

    def embed(
        self, input: object, *, timeout: float | None = None, **fields: Any
    ) -> EmbeddingResult:
        """The vectors of one text or a list of up to 2,048, as one job, whose end it waits for.

        ``fields``: others of :class:`.EmbedRequest`. To wait elsewhere, or to follow a long list,
        use ``submit(EmbedRequest(...))``.

        Raises what :meth:`submit` and :meth:`Job.result` do.
        """
        found = self.submit(EmbedRequest(input=input, **fields)).result(timeout)
        assert isinstance(found, EmbeddingResult)
        return found

    def rerank(
        self, query: object, documents: object, *, timeout: float | None = None, **fields: Any
    ) -> RerankResult:
        """How well ``documents`` answer ``query``, the best first; see :meth:`embed` and
        :class:`.RerankRequest`."""
        request = RerankRequest(query=query, documents=documents, **fields)
        found = self.submit(request).result(timeout)
        assert isinstance(found, RerankResult)
        return found

    def score(
        self, text_1: object, text_2: object, *, timeout: float | None = None, **fields: Any
    ) -> ScoreResult:
        """How well texts go together, pair by pair; see :meth:`embed` and
        :class:`.ScoreRequest`."""
        request = ScoreRequest(text_1=text_1, text_2=text_2, **fields)
        found = self.submit(request).result(timeout)
        assert isinstance(found, ScoreResult)
        return found

    def job(self, job_id: str, *, known: bool = False) -> Job[Any]:
        """The job with this id, from any producer.

        ``known``: Redis knew it before, so whoever waits for it hears if it is lost. Otherwise it
        may be a stock producer's, of which Redis has no trace before a worker takes it.
        """
        return Job(self, job_id, known=known)

    def models(self) -> list[registry.ModelCard]:
        """Every model that was ever served here, by name."""
        with self._in_use():
            return [card for _, card in sorted(registry.models(self.redis).items())]

    def model_card(self, name: str | None = None) -> registry.ModelCard:
        """The model ``name``; by default the client's, else the only one that is served.

        Raises:
            ModelNotServed: no worker has ever served it here.
            InvalidRequest: there is no default, and several are served.
        """
        with self._in_use():
            return self._admission.card(name or self.model)

    def workers(self) -> list[registry.WorkerCard]:
        """The workers that are alive now, by hostname."""
        with self._in_use():
            return registry.workers(self.redis)

    def close(self) -> None:
        self._closed = True
        self._app.close()
        close_idle(self.redis)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Wraps every use of Redis: translates its errors, and refuses a closed client."""
        self._check_open()
        try:
            with broker_errors(self.settings.redis_url):
                yield
        except Exception:
            self._check_open()
            raise
        finally:
            if self._closed:
                # `close` leaves connections in use open, and this thread has just used one.
                close_idle(self.redis)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the client was closed")


class Job(Generic[Result]):
    """One job. Its id is also Celery's task id."""

    def __init__(self, client: Client, job_id: str, *, known: bool) -> None:
        self.id = job_id
        self._known = known
        self._client = client
        self._redis = client.redis
        self.generation_config: dict[str, int | float] = {}
        """What the request did not name and :meth:`Client.submit` took from the model's files."""

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def stream(
        self, from_id: str | Position = FROM_THE_START, timeout: float | None = None
    ) -> Iterator[StreamEntry]:
        """Events as they arrive, from the first or the one after ``from_id`` to the terminal one. A
        :class:`.Position` moves on with them.

        Any number of readers may follow a job. A reader that was cut off resumes with
        ``from_id=entry.entry_id`` and misses nothing. The terminal event may arrive a moment
        before :meth:`result` finds the result.

        Raises:
            JobLost: Redis has lost the job.
            TimeoutError: no event arrived for ``timeout`` seconds.
        """
        cursor = StreamCursor(self.id, from_id, timeout)
        trace = self._trace()
        channel = keys.events_channel(database(self._redis), self.id)
        with ExitStack() as stack:
            pubsub: PubSub | None = None
            must_look = True
            while not cursor.ended:
                with self._client._in_use():
                    message = None
                    if not must_look:
                        # A job that has ended needs no subscription.
                        pubsub = pubsub or stack.enter_context(subscribe(self._redis, channel))
                        message = _heard(pubsub, cursor, trace)
                    if message is None:
                        reply, state = self._look(cursor, trace)
                if message is not None:
                    yield from cursor.news(message)
                    continue
                must_look = bool(reply) and len(reply[0][1]) == READ_COUNT
                yield from cursor.entries(reply, state)

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the end of the job.

        Raises:
            LlorchError: the job failed; the class says why. Cancelled after a cancel, JobLost if
                Redis has lost it.
            TimeoutError: the job has not ended within ``timeout`` seconds. It continues.
        """
        trace = self._trace()
        with self._client._in_use():
            end = self._state(trace).end
            if end is None:
                end = self._wait(timeout, trace)
        if isinstance(end, LlorchError):
            raise end
        return cast("Result", end)

    def cancel(self) -> bool:
        """Cancels the job; ``False`` if it has already ended, or if Redis does not know its id.

        A queued job ends at once and never runs. A running one ends within one engine step. A job
        of a stock producer is unknown until a worker takes it; Celery's ``revoke`` ends it earlier.
        """
        with self._client._in_use():
            outcome = cancel(self._redis, self.id, self._client.settings)
        return outcome in ("queued", "running")

    def status(self) -> JobStatus:
        """The job's current status."""
        with self._client._in_use():
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.mget(keys.result(self.id), keys.cancel(self.id))
                pipe.hmget(keys.job(self.id), "state", "sent")
                (meta, cancelling), (state, sent) = pipe.execute()
            waits = state in ("waiting", "scheduled")
            found = job_status(
                self.id,
                decode_state(meta),
                waits=waits,
                cancelling=cancelling is not None,
                ended=state == "ended",
            )
            if found.state == "queued":
                found = replace(found, position=position(self._redis, self.id))
        return replace(found, sent_at_s=None if sent is None else float(sent))

    def _look(self, cursor: StreamCursor, trace: Trace) -> tuple[Any, StoredState | None]:
        """New entries, or the job's state if there are none."""
        reply = self._read(cursor)
        state = None if reply else self._state(trace)
        if state is not None and state.end is not None:
            # The last events may have arrived between the two commands.
            reply = self._read(cursor)
        return reply, state

    def _read(self, cursor: StreamCursor) -> Any:
        return self._redis.xread({cursor.key: cursor.last_id}, count=READ_COUNT)

    def _trace(self) -> Trace:
        return Trace(self.id, self._client.settings.lease_s, known=self._known)

    def _state(self, trace: Trace) -> StoredState:
        with self._redis.pipeline(transaction=False) as pipe:
            return trace.state(trace.ask(pipe).execute())

    def _wait(self, timeout: float | None, trace: Trace) -> JobResult | LlorchError:
        give_up_s = math.inf if timeout is None else time.monotonic() + timeout
        channel = keys.result(self.id)
        with subscribe(self._redis, channel) as pubsub:
            while True:
                self._client._check_open()
                left_s = min(RESULT_POLL_S, give_up_s - time.monotonic())
                if left_s <= 0:
                    raise TimeoutError(f"job {self.id} has not ended within {timeout} s")
                # A message, a confirmation or silence. A message may be of a job of the same id in
                # another database: only the key is this job's.
                pubsub.get_message(timeout=left_s)
                end = self._state(trace).end
                if end is not None:
                    return end


def _heard(pubsub: PubSub, cursor: StreamCursor, trace: Trace) -> str | None:
    """The next message about a stream. None if it is time to look at it: after a while, and when
    the subscription has been made or renewed."""
    wait_s = RECHECK_S if trace.is_missing else RESULT_POLL_S
    left_s = cursor.left_s()
    message = pubsub.get_message(timeout=wait_s if left_s is None else min(wait_s, left_s))
    return message["data"] if message and message["type"] == "message" else None
