"""Writes the events of all jobs to their streams, in batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import redis
from celery.utils.log import get_logger
from redis.client import Pipeline
from redis.exceptions import NoScriptError, RedisError, ResponseError

from llorch_worker.broker import scripts
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.jobs import journal
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS, LastEntries
from llorch_worker.contract import Event, Tokens, Vectors
from llorch_worker.contract.frames import forget_frames
from llorch_worker.engine.told import TokensTold, joined
from llorch_worker.settings import Settings

logger = get_logger(__name__)

UNWATCHED_INTERVAL_S = 0.2
"""How often tokens are written while no client reads them and they only serve as the journal."""
GIVE_UP_CHECK_S = 0.1
MOST_APART = 8
"""So many events that a client waits for are written apart, an event for each token; more are
merged, as are those that nobody reads."""
MERGE_FROM = 64
"""Above this number a job's unwritten events are merged, so that an outage costs little memory."""
WRONG_TYPE = "WRONGTYPE"


@dataclass
class _Outbox:
    """The unwritten events of one delivery of a job.

    ``sending`` keeps its events and entry numbers until Redis confirms them. If the reply to a
    write is lost, they are sent again with the same numbers, and the script skips existing ones.
    """

    claim: Claim
    next_entry: int
    clears: bool = True
    events: list[Event | TokensTold] = field(default_factory=list)
    sending: list[Event] = field(default_factory=list)
    written_at_s: float = field(default_factory=time.monotonic)
    """Time of the last write, or at first of the opening, so that the event ``started`` waits for
    the first token no longer than a token would."""
    settled: threading.Event = field(default_factory=threading.Event)
    """Set when nothing is left to write. One for each job, so that a write wakes one thread."""
    watched: bool = True
    on_read: Callable[[bool], None] | None = None
    """See :meth:`Publisher.tell_readers`."""
    is_read: bool | None = None
    """Whether the last write found a reader; None before it."""
    urgent: bool = False
    began: bool = False
    lost: bool = False
    ending: bool = False
    """Whether the remaining events are left to be written with the result."""

    @property
    def empty(self) -> bool:
        return not self.events and not self.sending

    def taken(self) -> list[Event]:
        """The events, as they are to be written."""
        events, self.events = self.events, []
        apart = self.watched and len(events) <= MOST_APART
        return as_events(events if apart else merge_tokens(events))

    @property
    def waits(self) -> bool:
        """Whether the publisher's thread has something to write."""
        return bool(self.sending or (self.events and not self.ending))


class Publisher(Repeater):
    """A thread that takes events without blocking and writes them to Redis soon.

    A job's first tokens are written at once, and all tokens of a job that has lost a worker: if it
    is the one that kills, the journal soon shows no more progress. Other tokens are collected for
    ``flush_interval_ms`` while a client reads the stream, else for 200 ms. While Redis is away all
    events are kept; when it is back they are written once and in order. Entry ids are
    ``<number>-0``, with consecutive numbers within a claim. The last event and those that are still
    unwritten then go with the result.
    """

    def __init__(
        self,
        client: redis.Redis,
        settings: Settings,
        *,
        on_lost: Callable[[Claim], None],
        on_cancelled: Callable[[str], None],
    ) -> None:
        """``on_lost`` is called with a claim that was lost, ``on_cancelled`` with the id of a
        cancelled job."""
        self._redis = client
        self._interval_s = settings.flush_interval_ms / 1e3
        self._on_lost = on_lost
        self._on_cancelled = on_cancelled
        self._outboxes: dict[str, _Outbox] = {}
        self._changed = threading.Condition()
        self._wakes_at_s = float("-inf")
        """When the thread looks again by itself: it need not be woken for what is due later, as
        nearly all tokens are."""
        super().__init__("publisher", "write to streams", self._write_until_closed)

    def open(self, claim: Claim, next_entry: int, *, clears: bool = True) -> None:
        """Opens a job; its events are written under ``claim``, from entry ``next_entry`` on.
        ``clears``: see :func:`.queue_append`."""
        with self._changed:
            self._outboxes[claim.tag] = _Outbox(claim, next_entry, clears)

    def tell_readers(self, claim: Claim, on_read: Callable[[bool], None]) -> None:
        """Calls ``on_read`` each time that a write to the job's stream shows that a client reads it
        from now on, or no longer, and of the first. It must not block."""
        with self._changed:
            outbox = self._outboxes[claim.tag]
            outbox.on_read = on_read
            if outbox.is_read is not None:
                on_read(outbox.is_read)

    def append(self, claim: Claim, event: Event | TokensTold) -> None:
        """Takes one event of an open job. Thread-safe."""
        with self._changed:
            outbox = self._outboxes[claim.tag]
            if outbox.lost:
                return
            outbox.events.append(event)
            if len(outbox.events) >= MERGE_FROM:
                outbox.events = merge_tokens(outbox.events)
            is_tokens = isinstance(event, Tokens | TokensTold | Vectors)
            if is_tokens and (not outbox.began or outbox.claim.attempt > 1):
                outbox.began = outbox.urgent = True
            if self._due_at_s(outbox) < self._wakes_at_s:
                self._changed.notify()

    def flush(self, claim: Claim, give_up: Callable[[], bool]) -> bool:
        """Waits until all events of the job are written. ``False`` if its claim was lost, or if
        ``give_up`` returns True while Redis is away."""
        with self._changed:
            outbox = self._outboxes[claim.tag]
            outbox.ending = False
            if not outbox.empty:
                outbox.urgent = True
                outbox.settled.clear()
                self._changed.notify()
        while not (outbox.empty or outbox.lost or give_up()):
            outbox.settled.wait(GIVE_UP_CHECK_S)
        return outbox.empty and not outbox.lost

    def expect_end(self, claim: Claim) -> None:
        """Call it after the job's last event: events not yet being sent wait for :meth:`take`."""
        with self._changed:
            self._outboxes[claim.tag].ending = True

    def take(self, claim: Claim, give_up: Callable[[], bool]) -> LastEntries | None:
        """Waits for writes in progress and returns the events to write with the job's end. None if
        the claim was lost, or if ``give_up`` returns True while Redis is away."""
        with self._changed:
            outbox = self._outboxes[claim.tag]
            outbox.ending = True
            outbox.settled.clear()
        while outbox.sending and not (outbox.lost or give_up()):
            outbox.settled.wait(GIVE_UP_CHECK_S)
        with self._changed:
            if outbox.sending or outbox.lost:
                return None
            return LastEntries(outbox.next_entry, outbox.taken())

    def close_job(self, claim: Claim) -> None:
        """Closes a job and drops its remaining events."""
        with self._changed:
            self._outboxes.pop(claim.tag, None)

    def close(self) -> None:
        """Writes all remaining events, if Redis takes them, and ends the thread."""
        with self._changed:
            self.closing.set()
            self._changed.notify()
        super().close()
        if any(not outbox.empty for outbox in self._outboxes.values()):
            logger.error(
                "events of %d jobs were not written: Redis is unreachable", len(self._outboxes)
            )

    # The thread ------------------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        while self._write_next():
            self.served()

    def _write_next(self) -> bool:
        """In a call of its own, so that a thread that waits for events keeps no job."""
        if not (due := self._wait_for_due()):
            return False
        try:
            self._write(due)
        except NoScriptError as error:
            forget_frames(error)
            # The thread checks again which jobs are due, because one may have ended.
            scripts.load(self._redis, "append")
        return True

    def _wait_for_due(self) -> list[_Outbox]:
        """Waits for outboxes that are due, and gives those that are due soon as well; none when
        closing and everything is written."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                waiting = [outbox for outbox in self._outboxes.values() if outbox.waits]
                if self.closing.is_set():
                    return waiting
                first_s = min(map(self._due_at_s, waiting), default=float("inf"))
                if first_s <= now_s:
                    # Together with what is due soon: one write for jobs that run side by side.
                    return [each for each in waiting if self._due_at_s(each, 0.5) <= now_s]
                self._wakes_at_s = first_s
                self._changed.wait(first_s - now_s if waiting else None)
                self._wakes_at_s = float("-inf")

    def _due_at_s(self, outbox: _Outbox, share: float = 1.0) -> float:
        """When ``share`` of the time is over that its tokens may wait."""
        if outbox.urgent or outbox.sending:
            return float("-inf")
        interval_s = self._interval_s if outbox.watched else UNWATCHED_INTERVAL_S
        return outbox.written_at_s + share * interval_s

    def _write(self, due: list[_Outbox]) -> None:
        with self._changed:
            for outbox in due:
                if not outbox.sending:
                    outbox.sending = outbox.taken()
                    outbox.urgent = False
        with self._redis.pipeline(transaction=False) as pipe:
            queued = [outbox for outbox in due if self._queue(pipe, outbox)]
            replies = pipe.execute(raise_on_error=False)
        failure: RedisError | None = None
        for outbox, written in zip(queued, replies, strict=True):
            if isinstance(written, ResponseError) and WRONG_TYPE in str(written):
                logger.error("the stream key of job %s is not a stream", outbox.claim.job_id)
                self._confirm(outbox, watched=False)
            elif isinstance(written, RedisError):
                failure = written
            elif written & journal.WRITTEN:
                self._confirm(outbox, watched=bool(written & journal.IS_READ))
                if written & journal.CANCEL_REQUESTED:
                    self._on_cancelled(outbox.claim.job_id)
            else:
                self._lose(outbox)
        if failure is not None:
            raise failure

    def _queue(self, pipe: Pipeline, outbox: _Outbox) -> bool:
        """Adds a write to ``pipe``; False if the events cannot be encoded, which drops them."""
        try:
            journal.queue_append(
                pipe, outbox.claim, outbox.next_entry, outbox.sending, clears=outbox.clears
            )
        except ValueError as error:
            # The message may quote the answer.
            logger.error(
                "dropped %d events of job %s that cannot be encoded: %s",
                len(outbox.sending),
                outbox.claim.job_id,
                type(error).__name__,
            )
            outbox.sending = []
            self._confirm(outbox, watched=outbox.watched)
            return False
        return True

    def _confirm(self, outbox: _Outbox, *, watched: bool) -> None:
        with self._changed:
            outbox.next_entry += len(outbox.sending)
            outbox.sending = []
            outbox.written_at_s = time.monotonic()
            outbox.watched = watched
            if outbox.is_read != watched:
                outbox.is_read = watched
                if outbox.on_read is not None:
                    outbox.on_read(watched)
            if outbox.empty or outbox.ending:
                outbox.settled.set()

    def _lose(self, outbox: _Outbox) -> None:
        with self._changed:
            outbox.lost = True
            outbox.events, outbox.sending = [], []
            outbox.settled.set()
        HELD_CLAIMS.note_fenced()
        logger.warning(
            "lost the claim on job %s: another worker has it, or Redis lost its data",
            outbox.claim.job_id,
        )
        self._on_lost(outbox.claim)


def as_events(events: Iterable[Event | TokensTold]) -> list[Event]:
    """``events``, each of its own."""
    return [each.event() if isinstance(each, TokensTold) else each for each in events]


def merge_tokens(events: Iterable[Event | TokensTold]) -> list[Event | TokensTold]:
    """``events`` with each choice's consecutive tokens in one.

    The order within a choice is kept, and so is the order of tokens and other events. Tokens of
    different choices may change places, which makes no difference to a reader.
    """
    merged: list[Event | list[TokensTold]] = []
    runs: dict[int, list[TokensTold]] = {}
    for event in events:
        if not isinstance(event, TokensTold):
            runs.clear()
            merged.append(event)
        elif (run := runs.get(event.choice)) and event.goes_on(run[-1]):
            run.append(event)
        else:
            runs[event.choice] = [event]
            merged.append(runs[event.choice])
    return [joined(item) if isinstance(item, list) else item for item in merged]
