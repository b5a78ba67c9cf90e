"""Celery's consumer, hardened: logs never show a message, and no message stops the worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import BackendError, CPendingDeprecationWarning, NotRegistered, Reject
from celery.utils.log import get_logger
from celery.worker.consumer import Consumer
from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import DataError, RedisError
from redis.exceptions import TimeoutError as NoReply
from vine import promise

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet.registry import ANNOUNCE_INTERVAL_S
from llorch_worker.broker.jobs import dead_letters
from llorch_worker.broker.jobs.claims import Claim, ClaimTerms, Kind
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.jobs.settling import Settler
from llorch_worker.broker.messages.body import is_exit
from llorch_worker.broker.queues import place_of
from llorch_worker.contract import TASK_NAME, InvalidRequest, shown
from llorch_worker.contract.kinds import TEXT_TASKS
from llorch_worker.worker.celery.job_message import JobMessage
from llorch_worker.worker.celery.job_source import JobSource
from llorch_worker.worker.celery.message_faults import fault_of
from llorch_worker.worker.claimer import MOST_JOBS_A_CLAIM, Claimer, Startable

if TYPE_CHECKING:
    from llorch_worker.worker.residency import Residency
    from llorch_worker.worker.seat import Seat

logger = get_logger(__name__)

EVENTS_INTERVAL_S = 0.02
RECONNECT_PAUSES_S = {"interval_start": 0.2, "interval_step": 0.4, "interval_max": 5.0}
_CUT_OFF = (NoConnection, NoReply, OperationalError, ConnectionError)
"""What Celery answers with a new connection."""
_OUTAGES = (RedisError, BackendError, OSError, MemoryError)
"""What says nothing of the message, except Redis' ``DataError``."""
_NO_TASK = "it is not a valid task message"


class JobConsumer(Consumer):  # type: ignore[misc]
    """Answers messages that cannot become a task: with a log line that gives the size, a dead
    letter and, if there is an id, a FAILURE result with the reason."""

    task_consumer: JobSource | None = None

    def __init__(
        self, *args: Any, worker_options: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._events_due = False
        # With them every worker hears every other's heartbeats, and greets all others at its start.
        # What they would report, it reads in Redis.
        alone = dict(worker_options or {}) | {"without_gossip": True, "without_mingle": True}
        alone["heartbeat_interval"] = alone.get("heartbeat_interval") or ANNOUNCE_INTERVAL_S
        super().__init__(*args, worker_options=alone, **options)
        settings = self.app.settings
        self._terms = ClaimTerms.of(settings)
        self._claims = connect(settings.redis_url, decode=False)
        self.claimers = tuple(
            self._claimer_of(number, reads=reads)
            for number in range(settings.seats)
            for reads in (False, True)
        )
        self._settler = Settler(self._claims, self._terms, self._note_room)
        self.app.amqp.TaskConsumer = self._job_source

    def _claimer_of(self, number: int, *, reads: bool) -> Claimer:
        """A claimer of the worker's seat of this number. A model that generates and reads texts has
        room for both, so that neither waits for the other's end, and two claimers. Else one claims
        all its jobs, and that which ``reads`` texts none."""

        def seat() -> Seat:
            """There is one by the time that claims begin: the consumer starts last."""
            residency: Residency = self.app.residency
            return residency.seats[number]

        def kind() -> Kind | None:
            if not seat().engine.facts.does_both:
                return None if reads else "any"
            return "texts" if reads else "generation"

        def startable(model: str) -> Startable:
            reads_texts = reads or TASK_NAME not in seat().engine.facts.tasks
            return self._startable(model, reads=reads_texts)

        def place() -> str:
            if reads or not (own := seat()).may_be_chosen:
                return ""
            return place_of(own.model, self.hostname)

        return Claimer(
            self.app.settings.redis_url,
            lambda: seat().model,
            self._terms,
            self.hostname,
            sequences=lambda: seat().sequences,
            startable=startable,
            place=place,
            serves=lambda: seat().serves(),
            on_arrival=self._call_take,
            kind=kind,
        )

    def _job_source(self, connection: Any, **_: Any) -> JobSource:
        """In place of kombu's consumer of tasks."""
        self._hold(self.initial_prefetch_count)
        return JobSource(
            connection.default_channel,
            self.app.amqp.queues.consume_from.values(),
            on_queues=self._claim_from,
            on_prefetch_count=self._hold,
            on_close=self._end_claims,
        )

    def _claim_from(self, names: tuple[str, ...]) -> None:
        for claimer in self.claimers:
            claimer.queues = names
            claimer.look_again()
            if names:
                claimer.begin()
        if names:
            self._call_take()  # what came when there was no connection

    def _hold(self, most: int) -> None:
        for claimer in self.claimers:
            claimer.prefetch_count = most
        self.look_again()

    def look_again(self) -> None:
        """Has all claim soon; from any thread."""
        for claimer in self.claimers:
            claimer.look_again()

    def _note_room(self) -> None:
        for claimer in self.claimers:
            claimer.note_room()

    def _end_claims(self) -> None:
        """The worker's last act: jobs that never began go back to their queues."""
        for claimer in self.claimers:
            claimer.close()
        for claim in HELD_CLAIMS.all():
            self._give_back(claim)
        self._claims.close()

    def _call_take(self) -> None:
        self.pool.call_soon(self._take_arrived)

    def _take_arrived(self) -> None:
        """Takes what the claimers have brought; on the event loop's thread."""
        for claimer in self.claimers:
            self._take_from(claimer)

    def _take_from(self, claimer: Claimer) -> None:
        arrived, repeated = claimer.arrived, claimer.repeated
        if not (arrived or repeated):
            return
        try:
            while repeated:
                self._on_repeated(repeated.popleft())
            while arrived:
                # Since their claim the worker may have left its queues, or got a rate limit. Celery
                # would keep what is beyond that, and forget it with its connection.
                if claimer.queues and claimer.startable(arrived[0].model).most:
                    self._take(claimer)
                else:
                    self._give_back(arrived.popleft())
        finally:
            # After an error the rest waits for the next iteration, or for the next connection.
            (self._call_take if arrived or repeated else claimer.wake)()

    def _take(self, claimer: Claimer) -> None:
        """Takes the first that it has brought."""
        assert self.task_consumer is not None
        claim = claimer.arrived[0]
        try:
            message = JobMessage(claim, self._settler, self._terms.max_message_bytes)
            self.task_consumer.on_message(message)
        except BaseException:
            if HELD_CLAIMS.get(claim.tag) is not None:
                self._give_back(claim)
            raise
        finally:
            # Only now: what it took of the rate limit counts for the next claim.
            claimer.arrived.popleft()

    def _give_back(self, claim: Claim) -> None:
        try:
            self._settler.hand_back(claim)
        except RedisError as error:
            logger.warning("a job waits for its lease to lapse: %s", type(error).__name__)

    def on_connection_error_after_connected(self, error: Exception) -> None:
        """Keeps running jobs."""
        with warnings.catch_warnings():
            # Hides a warning about a setting that is off on purpose: no running job is redelivered.
            warnings.simplefilter("ignore", CPendingDeprecationWarning)
            super().on_connection_error_after_connected(error)

    def ensure_connected(self, conn: Any) -> Any:
        """Like Celery's, but tries again sooner: its pauses of 2 to 30 s outlast a lease."""
        conn.ensure_connection = partial(conn.ensure_connection, **RECONNECT_PAUSES_S)
        return super().ensure_connected(conn)

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
        if self.task_consumer is not None:
            self.look_again()

    def _startable(self, model: str, *, reads: bool) -> Startable:
        """The most jobs of a model, which generate or ``reads`` texts, that its engine and the rate
        limits let start now. The others wait in Redis, where other workers can take them. The token
        itself is taken by Celery, when the job arrives."""
        if not self.app.residency.is_ready(model):
            return Startable(0)  # the seat says when to claim again
        tasks = TEXT_TASKS if reads else (TASK_NAME,)
        found = [] if self.disable_rate_limits else map(self.task_buckets.get, tasks)
        if not (buckets := [bucket for bucket in found if bucket is not None]):
            return Startable(MOST_JOBS_A_CLAIM)
        # Which task the next job is of, its claim tells.
        wait_s = max(bucket.expected_time() for bucket in buckets)
        return Startable(0, wait_s) if wait_s else Startable(1)

    def on_send_event_buffered(self) -> None:
        """Sends buffered events every few ms. Sending them at each iteration of the event loop
        would take much of its time with many short jobs. An idle worker sends them at once."""
        if not len(HELD_CLAIMS):
            super().on_send_event_buffered()
        elif self.hub is not None and not self._events_due:
            self._events_due = True
            self.hub.call_later(EVENTS_INTERVAL_S, self._flush_due_events)

    def _flush_due_events(self) -> None:
        self._events_due = False
        self._flush_events()

    def call_soon_ack(self, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Acknowledges at once: the pool already calls back on the event loop's thread."""
        return operation(*args, **options)

    def create_task_handler(self, promise: Any = promise) -> Callable[[Any], Any]:
        handle = super().create_task_handler(promise)

        def on_task_received(message: Any) -> Any:
            try:
                fault = fault_of(message)
                if fault is None:
                    return handle(message)
            except Reject:
                # The claim was lost before the job's end could be stored.
                return message.reject_log_error(logger, self.connection_errors, requeue=True)
            except _CUT_OFF:
                raise
            except _OUTAGES as error:
                logger.error("cannot take a job now: %s", type(error).__name__)
                if not isinstance(error, DataError):
                    return self._put_back(message)
                fault = _NO_TASK
            except BaseException as error:
                if is_exit(error):
                    raise
                # It would end this worker, then the next one. kombu takes a KeyError for a
                # connection error: it would reconnect and get the message again, for ever.
                logger.error("cannot take a message: %s", type(error).__name__)
                fault = _NO_TASK
            try:
                return self._refuse(message, fault)
            except _CUT_OFF:
                raise
            except RedisError as error:
                logger.error("cannot refuse a job now: %s", type(error).__name__)
                return self._put_back(message)

        return on_task_received

    def _put_back(self, message: Any) -> None:
        """Has the job run again after the next sweep. The attempt counts, so that it ends if the
        reason lasts."""
        free = partial(message.reject_log_error, logger, self.connection_errors, requeue=True)
        for settle in (message.lapse, free):
            try:
                settle()
            except RedisError as error:
                logger.warning("a job waits for its lease to lapse: %s", type(error).__name__)

    def on_unknown_message(self, _body: Any, message: Any) -> None:
        self._refuse(message, "it is not a task message")

    def on_unknown_task(self, _body: Any, message: Any, _error: Exception) -> None:
        name = shown(message.headers["task"])
        self._refuse(message, f"unknown task {name!r}", NotRegistered(name))

    def on_invalid_task(self, _body: Any, message: Any, _exc: Exception) -> None:
        self._refuse(message, _NO_TASK)

    def on_decode_error(self, message: Any, _exc: Exception) -> None:
        """Of a control message: the others are decoded before."""
        size = len(message.body or "")
        logger.error("ignored a control message of %d bytes that cannot be read", size)

    def _refuse(self, message: Any, reason: str, error: Exception | None = None) -> None:
        size = message.size
        logger.error("refused a message of %d bytes: %s", size, reason)
        if error is None:
            error = InvalidRequest.from_fault("message", reason, f"{size} bytes")
        dead_letters.refuse(self._claims, message.claim, reason, error, self._terms)
        HELD_CLAIMS.note_end(message.claim)
        message.reject_log_error(logger, self.connection_errors)
