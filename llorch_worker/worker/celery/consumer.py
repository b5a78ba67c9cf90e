"""Celery's consumer, hardened: logs never show a message, and no message stops the worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery.exceptions import CPendingDeprecationWarning, NotRegistered, Reject
from celery.utils.log import get_logger
from celery.worker.consumer import Consumer
from kombu.compression import encoders, get_decoder
from kombu.exceptions import ContentDisallowed, DecodeError
from vine import promise

from llorch_worker.broker.claim_channel import MOST_JOBS_A_CLAIM
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.queues import worker_queue
from llorch_worker.broker.transport import keep_claims
from llorch_worker.contract import TASK_NAME, Fault, InvalidRequest, shown
from llorch_worker.worker.celery.request import MAX_ID_CHARS

logger = get_logger(__name__)

EVENTS_INTERVAL_S = 0.02
RECONNECT_PAUSES_S = {"interval_start": 0.2, "interval_step": 0.4, "interval_max": 5.0}
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


class JobConsumer(Consumer):  # type: ignore[misc]
    """Answers messages that cannot become a task: with a log line that gives the size, a dead
    letter and, if there is an id, a FAILURE result with the reason."""

    task_consumer: Any = None

    def __init__(
        self, *args: Any, worker_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._events_due = False
        self._awaits_token = False
        # With them every worker hears every other's heartbeats, and greets all others at its start.
        # What they would report, it reads in Redis.
        alone = dict(worker_options or {}) | {"without_gossip": True, "without_mingle": True}
        super().__init__(*args, worker_options=alone, **options)

    def on_connection_error_after_connected(self, error: Exception) -> None:
        """Keeps running jobs."""
        keep_claims(self.connection)
        with warnings.catch_warnings():
            # Hides a warning about a setting that is off on purpose: no running job is redelivered.
            warnings.simplefilter("ignore", CPendingDeprecationWarning)
            super().on_connection_error_after_connected(error)

    def ensure_connected(self, conn: Any) -> Any:
        """Like Celery's, but tries again sooner: its pauses of 2 to 30 s outlast a lease."""
        conn.ensure_connection = partial(conn.ensure_connection, **RECONNECT_PAUSES_S)
        return super().ensure_connected(conn)

    def connect(self) -> Any:
        connection = super().connect()
        connection.default_channel.allowance = self._startable
        connection.default_channel.place = self._place
        connection.default_channel.on_repeated = self._on_repeated
        return connection

    def _place(self) -> str:
        residency = self.app.residency
        if residency is None or not residency.may_be_chosen:
            return ""
        return worker_queue(self.app.settings.served_name, self.hostname)

    def _on_repeated(self, job_id: str) -> None:
        logger.warning(
            "job %s has ended before: its first result stands, and this message is dropped; "
            "send a new job under a new id",
            shown(job_id),
        )
        if self.event_dispatcher:
            self.event_dispatcher.send("task-rejected", uuid=job_id, requeue=False)

    def reset_rate_limits(self) -> None:
        """Called when a limit changed."""
        super().reset_rate_limits()
        self._claim_again()

    def _startable(self) -> int:
        """The most jobs that the rate limit lets start now. The others wait in Redis, where other
        workers can take them. The token itself is taken by Celery, when the job arrives."""
        bucket = None if self.disable_rate_limits else self.task_buckets[TASK_NAME]
        if bucket is None:
            return MOST_JOBS_A_CLAIM
        wait_s = bucket.expected_time()
        if not wait_s:
            return 1
        if not self._awaits_token:
            self._awaits_token = True
            self.hub.call_later(wait_s, self._claim_again)
        return 0

    def _claim_again(self) -> None:
        self._awaits_token = False
        if self.task_consumer is not None:
            self.task_consumer.channel.look_again()

    def on_send_event_buffered(self) -> None:
        """Sends buffered events every few ms. Sending them at each turn of the event loop would
        take much of its time with many short jobs. An idle worker sends them at once."""
        if not len(HELD_CLAIMS):
            super().on_send_event_buffered()
        elif self.hub is not None and not self._events_due:
            self._events_due = True
            self.hub.call_later(EVENTS_INTERVAL_S, self._flush_due_events)

    def _flush_due_events(self) -> None:
        self._events_due = False
        self._flush_events()

    def call_soon_ack(self, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Acknowledges at once. The pool already calls back on the event loop's thread, and the
        loop's set of pending acknowledgements would reorder jobs that go back."""
        return operation(*args, **options)

    def create_task_handler(self, promise: Any = promise) -> Callable[[Any], Any]:
        handle = super().create_task_handler(promise)

        def on_task_received(message: Any) -> Any:
            fault = fault_of(message)
            if fault is not None:
                return self._refuse(message, fault)
            try:
                return handle(message)
            except _MALFORMED as error:
                # kombu takes a KeyError for a connection error: it would reconnect and get the
                # message again, for ever.
                return self._refuse(message, f"it cannot be read ({type(error).__name__})")
            except Reject:
                # The claim was lost before the job's end could be stored.
                return message.reject_log_error(logger, self.connection_errors, requeue=True)

        return on_task_received

    def on_unknown_message(self, _body: Any, message: Any) -> None:
        self._refuse(message, "it is not a task message")

    def on_unknown_task(self, _body: Any, message: Any, _error: Exception) -> None:
        name = shown(message.headers["task"])
        self._refuse(message, f"unknown task {name!r}", NotRegistered(name))

    def on_invalid_task(self, _body: Any, message: Any, exc: Exception) -> None:
        self._refuse(message, f"it is not a valid task message ({type(exc).__name__})")

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._refuse(message, _undecodable(message, exc))

    def _refuse(self, message: Any, reason: str, error: Exception | None = None) -> None:
        size = _size_of(message)
        logger.error("refused a message of %d bytes: %s", size, reason)
        if error is None:
            fault = Fault(field="message", rule=reason, got=f"{size} bytes")
            error = InvalidRequest.from_faults([fault])
        message.channel.refuse(message.delivery_tag, reason, error)
        message.reject_log_error(logger, self.connection_errors)
        job_id = _id_of(message)
        if job_id is not None and self.event_dispatcher:
            self.event_dispatcher.send("task-failed", uuid=job_id, exception=repr(error))


def fault_of(message: Any) -> str | None:
    """The reason why this is not a task message, ``None`` if it is one. Those of protocol 1 have
    become messages of protocol 2: see ``broker/message.py``."""
    headers = message.headers
    if not isinstance(headers, Mapping):
        return "its headers are not an object"
    if "task" not in headers:
        return "it is not a task message"
    if not isinstance(headers["task"], str):
        return "its task header is not a string"
    if headers.get("eta") is not None:
        # Those that a claim could read are no longer in the headers.
        return "its eta is not a time as Celery writes it"
    if _id_of(message) is None:
        return f"its id is not a string of 1 to {MAX_ID_CHARS} characters"
    try:
        body = message.payload
    except (DecodeError, ContentDisallowed, *_MALFORMED) as error:
        return _undecodable(message, error)
    match body:
        case [list(), dict(), dict() | None]:
            return None
    return "its body is not [args, kwargs, options]"


def _undecodable(message: Any, error: Exception) -> str:
    compression = message.headers.get("compression")
    try:
        get_decoder(compression or "gzip")
    except (LookupError, TypeError):
        return f"its compression {shown(compression)} is none of {', '.join(encoders())}"
    return f"its body cannot be decoded ({type(error).__name__})"


def _id_of(message: Any) -> str | None:
    job_id = message.headers.get("id") if isinstance(message.headers, Mapping) else None
    return job_id if isinstance(job_id, str) and 0 < len(job_id) <= MAX_ID_CHARS else None


def _size_of(message: Any) -> int:
    """The size of the body; 0 if it is not text."""
    return len(message.body) if isinstance(message.body, str | bytes) else 0
