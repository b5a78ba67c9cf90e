"""Celery's Redis result backend, with one end for each job.

Keys and documents are Celery's own, so ``AsyncResult`` of any app reads them. The write differs:
one script (``lua/finish.lua``) stores the state only while the claim of the delivery holds and the
job has not ended, and writes the stream's last events in the same step. What Celery does after an
end is noted in the same step too, so that another worker does it if this one dies first: see
:mod:`llorch_worker.worker.celery.follow_ups`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from celery.backends.base import Backend
from celery.backends.redis import RedisBackend, SentinelBackend
from celery.exceptions import Reject
from celery.states import READY_STATES
from kombu.exceptions import EncodeError, OperationalError
from kombu.log import get_logger
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import DataError, RedisError
from redis.exceptions import TimeoutError as NoReply

from llorch_worker.broker.connections.connection import connect, is_out_of_memory, is_refused_write
from llorch_worker.broker.connections.outage import RedisOutage
from llorch_worker.broker.jobs import usage
from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.broker.jobs.ended_jobs import ENDED_JOBS
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.jobs.results import (
    FAILURE,
    REVOKED,
    SUCCESS,
    decode_state,
    result_meta,
    terminal_event,
)
from llorch_worker.broker.messages.message import TENANT, encode_json, trace_id
from llorch_worker.broker.queues import model_of
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import (
    REQUESTS,
    Fault,
    InternalError,
    InvalidRequest,
    JobResult,
    LlorchError,
    describe,
    encode_event,
)
from llorch_worker.contract.plain_objects import unmark_plain

logger = get_logger(__name__)

RETRY_S = 300.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 2.0
_OF_MESSAGE = (
    *(LookupError, TypeError, ValueError, AttributeError, RecursionError),
    *(DataError, EncodeError),
)
"""What Celery raises for a task that it cannot name or serialise. An ``OSError``, which may also be
a ``ValueError``, is none of these."""
_NEVER = threading.Event()
"""For apps without a worker."""


class _OneEnd(Backend):  # type: ignore[misc]
    """A mixin for Celery's backends; see the module's docstring."""

    def _create_client(self, **_: Any) -> Any:
        # Celery reads some options of a URL only.
        return connect(self.app.settings.redis_url, decode=False)

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        """Also while Redis refuses everybody. At ``maxmemory`` the script may write, so that what
        it refuses there is something else."""
        refused = is_refused_write(exc) and not is_out_of_memory(exc)
        return refused or bool(super().exception_safe_to_retry(exc))

    def _ensure_retryable(
        self,
        func: Any,
        *args: Any,
        fallback_exc: Any = None,
        fallback_msg: str | None = None,
        max_retries: int | None = None,  # noqa: ARG002 - Celery's signature
        **options: Any,
    ) -> Any:
        """Like Celery's, but logs an outage in one line, and ends with the worker's time to drain.

        After :data:`RETRY_S` it raises what Celery's raises, and the job goes back to its queue.
        """
        until_s, pause_s = time.monotonic() + RETRY_S, FIRST_PAUSE_S
        while True:
            try:
                value = func(*args, **options)
            except Exception as error:
                if not self.exception_safe_to_retry(error):
                    raise
                self._outage.failed(error)
                if time.monotonic() >= until_s:
                    raise (fallback_exc(fallback_msg) if fallback_exc else error) from error
            else:
                self._outage.over()
                return value
            if getattr(self.app, "out_of_time", _NEVER).wait(pause_s):
                raise Reject("the worker ends, and Redis is away", requeue=True)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    @cached_property
    def _outage(self) -> RedisOutage:
        return RedisOutage("store results")

    def store_result(
        self, task_id: str, result: Any, state: str, *args: Any, request: Any = None, **options: Any
    ) -> Any:
        ours = getattr(request, "task", None) in REQUESTS and _delivery_tag(task_id, request)
        foreign = isinstance(result, Exception) and not isinstance(result, LlorchError)
        if state == FAILURE and ours and foreign:
            # The job itself raises none but ours. Celery failed on what follows it.
            kind = type(result).__name__
            logger.error("job %s: what follows it could not be sent: %s", task_id, kind)
            result = _fault_of_next(result, request)
        return super().store_result(task_id, result, state, *args, request=request, **options)

    def _store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: str | None = None,
        request: Any = None,
        **_: Any,
    ) -> Any:
        # Like Celery's, but without the arguments: ``result_extended`` would store the prompt.
        children = self.current_task_children(request)
        meta = result_meta(task_id, state, result, traceback=traceback, children=children)
        for name, of_request in (("group_id", "group"), ("parent_id", "parent_id")):
            if related := getattr(request, of_request, None):
                meta[name] = related
        document = encode_json(meta)
        end: Any = result if state == SUCCESS else decode_state(document).end
        event = ""
        # Celery's own tasks, such as celery.accumulate, return other values and have no stream.
        if isinstance(end, JobResult | LlorchError):
            event = encode_event(terminal_event(end))
        tag = _delivery_tag(task_id, request)
        claim = HELD_CLAIMS.get(tag)
        settings = self.app.settings
        entries: tuple[Any, ...] = ()
        if claim is not None and event:
            last = HELD_CLAIMS.last_entries(claim)
            used = usage.written(
                getattr(request, TENANT, None),
                model_of(claim.list_key),
                end,
                last.spent,
                keep_s=settings.usage_days * 24 * 3600,
            )
            entries = (used, last.first_entry, *map(encode_event, last.events))
        follow_ms = round(settings.lease_s * 1e3) if follows(request, state) else ""
        stored = run_script(
            self.client,
            "finish",
            [
                task_id,
                tag.rpartition("/")[2],
                document,
                settings.result_ttl_s,
                event,
                settings.stream_ttl_s,
                follow_ms,
                *entries,
            ],
        )
        if tag and not stored:
            HELD_CLAIMS.note_fenced()
            # Celery must not go on as if the job had this state: the job runs again, or has.
            raise Reject("another delivery of the job has taken over", requeue=True)
        # Once: Celery stores a failure too if it cannot send the next task of a chain.
        if claim is not None and event and not HELD_CLAIMS.has_ended(claim):
            HELD_CLAIMS.note_end(claim)
            worker = getattr(request, "hostname", None) or ""
            trace = trace_id(getattr(request, "traceparent", None))
            resumed = HELD_CLAIMS.last_entries(claim).resumed
            ENDED_JOBS.note(claim, worker, end, trace, resumed=resumed)
        return result

    def decode_result(self, payload: Any) -> Any:
        """For ``AsyncResult`` of our app. Celery decodes what it sends on, as to the body of a
        chord, by other ways, and it keeps its marks."""
        return unmark_plain(super().decode_result(payload))

    def mark_as_done(
        self, task_id: str, result: Any, request: Any = None, *args: Any, **options: Any
    ) -> None:
        with self._following_up(task_id, request, SUCCESS):
            super().mark_as_done(task_id, result, request, *args, **options)

    def mark_as_failure(
        self, task_id: str, exc: Any, *args: Any, request: Any = None, **options: Any
    ) -> None:
        cut_off = isinstance(exc, OperationalError) and isinstance(
            exc.__cause__, NoConnection | NoReply
        )
        if cut_off and _delivery_tag(task_id, request):
            # Celery sends the next task of a chain before it stores the result. The job itself has
            # succeeded: it goes back, and ends when Redis is there again.
            raise Reject("the next task could not be sent", requeue=True)
        with self._following_up(task_id, request, FAILURE):
            super().mark_as_failure(task_id, exc, *args, request=request, **options)

    def mark_as_revoked(
        self, task_id: str, reason: str = "", request: Any = None, **options: Any
    ) -> None:
        if request is None:
            # A worker heard of the revoke before it saw the message: the job waits somewhere.
            settings = self.app.settings
            cancel(self.client, task_id, settings, heard_by=settings.served_name)
            return
        with self._following_up(task_id, request, REVOKED):
            super().mark_as_revoked(task_id, reason, request=request, **options)

    def sends_body(self, request: Any) -> bool:
        """Whether a worker has begun to send the body of the request's chord and has not finished.

        Celery lets nobody else send it for some seconds, also if that worker died.
        """
        sender = self.client.get(self.get_key_for_group(request.group, ".c"))
        return sender not in (None, b"done")

    @contextmanager
    def _following_up(self, task_id: str, request: Any, state: str) -> Iterator[None]:
        """Wraps what stores an end and does what follows it, and notes that both are done.

        An end that cannot be stored raises BackendStoreError, or what Redis answered. Any other
        error of Redis comes after it, and Celery would take it for an error of the task: a chord
        would fail although its part succeeded. A worker follows up later instead.
        """
        if not follows(request, state):
            yield
            return
        tag = _delivery_tag(task_id, request)
        try:
            try:
                yield
            except _OF_MESSAGE as error:
                if isinstance(error, OSError):
                    raise
                claim = HELD_CLAIMS.get(tag)
                if claim is None or not HELD_CLAIMS.has_ended(claim):
                    raise
                # The end stands. Another worker cannot do what follows either.
                kind = type(error).__name__
                logger.error("cannot follow up the end of job %s: %s", task_id, kind)
            keep_s = self.app.settings.result_ttl_s
            run_script(self.client, "followed_up", [task_id, keep_s, tag.rpartition("/")[2]])
        except (RedisError, OperationalError) as error:
            claim = HELD_CLAIMS.get(tag)
            stored = claim is not None and HELD_CLAIMS.has_ended(claim)
            away = isinstance(error, NoConnection | NoReply | OperationalError)
            if not (stored or away):
                raise
            logger.warning("a worker will follow up the end of job %s later: %s", task_id, error)


def follows(request: Any, state: str) -> bool:
    """Whether Celery has more to do after storing this end: a part of a chord to count, later tasks
    of a chain to fail, or errbacks to call."""
    if state == FAILURE and any(getattr(request, name, None) for name in ("chain", "errbacks")):
        return True
    return state in READY_STATES and bool(getattr(request, "chord", None))


def _fault_of_next(error: Exception, request: Any) -> LlorchError:
    """The end of a job whose next tasks could not be sent. It may be sent again, unless they are
    themselves what is wrong."""
    # kombu's error wraps those of Redis, and a KeyError.
    cause = (error.__cause__ if isinstance(error, OperationalError) else None) or error
    next_tasks = {name: getattr(request, name, None) for name in ("callbacks", "chain")}
    rule = "must be tasks that Celery can send"
    faults = [
        Fault(field=name, rule=rule, got=describe(value))
        for name, value in next_tasks.items()
        if value
    ]
    if faults and isinstance(cause, _OF_MESSAGE) and not isinstance(cause, OSError):
        return InvalidRequest.from_faults(faults)
    reason = "Redis is at its maxmemory" if is_out_of_memory(cause) else type(cause).__name__
    return InternalError(f"the job has run, but its next task could not be sent: {reason}")


def _delivery_tag(task_id: str, request: Any) -> str:
    """The tag of the delivery that ``request`` comes from; "" for a job that was not delivered."""
    tag = (getattr(request, "properties", None) or {}).get("delivery_tag") or ""
    return tag if tag.rpartition("/")[0] == task_id else ""


class ResultBackend(_OneEnd, RedisBackend):  # type: ignore[misc]
    """The backend for ``redis://`` and ``rediss://``."""


class SentinelResultBackend(_OneEnd, SentinelBackend):  # type: ignore[misc]
    """The backend for ``sentinel://``."""
