"""One thread that writes the events of all jobs to their streams, in batches."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import redis
from celery.utils.log import get_logger
from redis.exceptions import RedisError, ResponseError

from llorch_worker.broker import keys
from llorch_worker.contract import TERMINAL_EVENTS, Event, Tokens, encode_event
from llorch_worker.worker.coalesce import coalesce

logger = get_logger(__name__)

UNWATCHED_INTERVAL_S = 0.2
"""How often tokens are written while nobody reads: they are then only for later readers."""
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0
COALESCE_FROM = 64
"""From this many unwritten events of a job on they are joined: an absent Redis costs text only."""
ALREADY_THERE = "equal or smaller"


@dataclass
class _Outbox:
    """The unwritten events of one job.

    ``sending`` keeps its entry numbers until Redis has confirmed them: where the answer to a write
    was lost, the same numbers are sent again and Redis refuses those that it has.
    """

    events: list[Event] = field(default_factory=list)
    sending: list[tuple[int, str]] = field(default_factory=list)
    next_entry: int | None = None
    written_at_s: float = float("-inf")
    watched: bool = True
    urgent: bool = False
    began: bool = False
    ended: bool = False

    @property
    def empty(self) -> bool:
        return not self.events and not self.sending


class Publisher:
    """Takes events without blocking and writes them to Redis soon.

    A job's first tokens and its terminal event go out at once; between them tokens are collected
    for ``flush_interval_ms`` while somebody reads the stream, for 200 ms otherwise. Where Redis is
    away everything is kept, joined, and written when it is back, once and in order. Entry ids are
    ``1-0``, ``2-0``, ... in each stream.
    """

    def __init__(self, client: redis.Redis, *, flush_interval_ms: int, stream_ttl_s: int) -> None:
        self._redis = client
        self._interval_s = flush_interval_ms / 1e3
        self._ttl_s = stream_ttl_s
        self._outboxes: dict[str, _Outbox] = {}
        # One lock: what is neither unsent nor confirmed must not look written in between.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._written = threading.Condition(lock)
        self._closing = False
        self._give_up_s = float("inf")
        self._thread = threading.Thread(target=self._run, name="llorch-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def append(self, job_id: str, event: Event) -> None:
        """Takes one event of a job; from any thread."""
        with self._changed:
            outbox = self._outboxes.setdefault(job_id, _Outbox())
            outbox.events.append(event)
            if len(outbox.events) >= COALESCE_FROM:
                outbox.events = coalesce(outbox.events)
            outbox.ended = outbox.ended or isinstance(event, TERMINAL_EVENTS)
            first_tokens = isinstance(event, Tokens) and not outbox.began
            outbox.began = outbox.began or first_tokens
            outbox.urgent = outbox.urgent or first_tokens or outbox.ended
            self._changed.notify()

    def flush(self, job_id: str, timeout_s: float) -> bool:
        """Waits until everything of this job is written; ``False`` if that takes too long."""
        with self._written:
            return self._written.wait_for(lambda: self._is_written(job_id), timeout_s)

    def forget(self, job_id: str) -> None:
        """Drops what is left of a job that goes back to its queue."""
        with self._changed:
            self._outboxes.pop(job_id, None)

    def close(self, timeout_s: float) -> None:
        """Writes what is left, for at most ``timeout_s``, and ends the thread."""
        with self._changed:
            self._closing = True
            self._give_up_s = time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join()
        if self._outboxes:
            logger.error("events of %d jobs were not written: no Redis", len(self._outboxes))

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        retry_s = 0.0
        while True:
            with self._changed:
                if retry_s:
                    self._changed.wait_for(lambda: self._closing, retry_s)
                due = self._wait_for_due()
            if due is None or time.monotonic() > self._give_up_s:
                return
            try:
                self._write(due)
            except RedisError as error:
                if not retry_s:
                    logger.warning("cannot write to streams, will retry: %s", error)
                retry_s = min(max(retry_s * 2, FIRST_RETRY_S), LONGEST_RETRY_S)
                continue
            if retry_s:
                logger.info("writing to streams again")
                retry_s = 0.0
            with self._written:
                self._written.notify_all()

    def _wait_for_due(self) -> dict[str, _Outbox] | None:
        """The outboxes whose time has come; ``None`` when closing and all is written."""
        while True:
            now_s = time.monotonic()
            times = {
                job_id: self._due_at_s(outbox)
                for job_id, outbox in self._outboxes.items()
                if not outbox.empty
            }
            due = [job_id for job_id, at_s in times.items() if self._closing or at_s <= now_s]
            if due:
                return {job_id: self._outboxes[job_id] for job_id in due}
            if self._closing:
                return None
            self._changed.wait(min(times.values()) - now_s if times else None)

    def _due_at_s(self, outbox: _Outbox) -> float:
        if outbox.urgent or outbox.sending:
            return float("-inf")
        interval_s = self._interval_s if outbox.watched else UNWATCHED_INTERVAL_S
        return outbox.written_at_s + interval_s

    def _write(self, due: dict[str, _Outbox]) -> None:
        self._number_entries(due)
        with self._redis.pipeline(transaction=False) as pipe:
            plan: list[tuple[str, _Outbox, int]] = []
            for job_id, outbox in due.items():
                for number, document in outbox.sending:
                    pipe.xadd(keys.events(job_id), {"event": document}, id=f"{number}-0")
                pipe.expire(keys.events(job_id), self._ttl_s)
                pipe.exists(keys.watchers(job_id))
                plan.append((job_id, outbox, len(outbox.sending)))
            replies = iter(pipe.execute(raise_on_error=False))
        failure: RedisError | None = None
        for job_id, outbox, count in plan:
            answers = [next(replies) for _ in range(count + 2)]
            refused = _refusal(answers[:count])
            if refused is None:
                self._confirm(job_id, outbox, watched=answers[-1] == 1)
            elif _is_permanent(refused):
                self._abandon(job_id, refused)
            else:
                failure = refused
        if failure is not None:
            raise failure

    def _number_entries(self, due: dict[str, _Outbox]) -> None:
        """Turns events into numbered entries, going on where the stream ends."""
        fresh = [job_id for job_id, outbox in due.items() if outbox.next_entry is None]
        if fresh:
            with self._redis.pipeline(transaction=False) as pipe:
                for job_id in fresh:
                    pipe.xrevrange(keys.events(job_id), count=1)
                for job_id, last in zip(fresh, pipe.execute(raise_on_error=False), strict=True):
                    if isinstance(last, RedisError):
                        if not _is_permanent(last):
                            raise last
                        self._abandon(job_id, last)
                        del due[job_id]
                    else:
                        due[job_id].next_entry = _number_after(last)
        for outbox in due.values():
            with self._changed:
                events, outbox.events = outbox.events, []
                outbox.urgent = False
                for event in coalesce(events):
                    assert outbox.next_entry is not None
                    outbox.sending.append((outbox.next_entry, encode_event(event)))
                    outbox.next_entry += 1

    def _confirm(self, job_id: str, outbox: _Outbox, *, watched: bool) -> None:
        with self._changed:
            outbox.sending = []
            outbox.written_at_s = time.monotonic()
            outbox.watched = watched
            if outbox.ended and outbox.empty:
                self._outboxes.pop(job_id, None)

    def _abandon(self, job_id: str, error: RedisError) -> None:
        logger.error("the stream of job %s cannot be written: %s", job_id, error)
        self.forget(job_id)

    def _is_written(self, job_id: str) -> bool:
        outbox = self._outboxes.get(job_id)
        return outbox is None or outbox.empty


def _refusal(answers: list[Any]) -> RedisError | None:
    """The error among the replies to a job's writes, unless all are there already."""
    for answer in answers:
        if isinstance(answer, ResponseError) and ALREADY_THERE in str(answer):
            continue
        if isinstance(answer, RedisError):
            return answer
    return None


def _is_permanent(error: RedisError) -> bool:
    """Whether trying again is of no use: somebody made the stream's key something else."""
    return str(error).startswith("WRONGTYPE")


def _number_after(last: list[Any]) -> int:
    """The number that follows the last entry of a stream, as XREVRANGE gives it."""
    return int(last[0][0].partition("-")[0]) + 1 if last else 1
