"""Waiting for the results of any number of jobs over one connection to Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import redis.asyncio
from redis.asyncio.client import PubSub

from llorch_worker.broker import keys
from llorch_worker.broker.results import decode_state
from llorch_worker.client.cancelling import cancelled
from llorch_worker.client.client import RESULT_POLL_S
from llorch_worker.client.lost import Trace
from llorch_worker.contract import GenerationResult, JobLost, LlorchError

MOST_AT_ONCE = 500
"""Keys per command, because Redis serves no one else during a command; also the messages read
before new waiters have their turn."""
TASK_NAME = "llorch-results"

End = GenerationResult | LlorchError


@dataclass(eq=False)
class _Waiter:
    end: asyncio.Future[End]
    job_id: str
    trace: Trace


class ResultListener:
    """Hears of results by pub/sub, and also polls for all of them every ``RESULT_POLL_S``.

    One task serves all waiters and alone uses the subscription: redis-py's breaks if one task
    subscribes while another's read reconnects. The task ends after the last waiter.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._waiting: dict[str, list[_Waiter]] = {}
        """By the job's result key, which is also the name of its channel."""
        self._newcomers: set[str] = set()
        """The keys that the task has not seen yet."""
        self._task: asyncio.Task[None] | None = None
        self._sleep: asyncio.Timeout | None = None
        self._closed = False

    async def end_of(self, job_id: str, trace: Trace) -> End:
        """Waits for the end of the job; ``JobLost`` if Redis has lost it.

        Raises:
            RedisError: Redis does not answer.
            RuntimeError: the listener was closed.
        """
        if self._closed:
            raise RuntimeError("the client was closed")
        key = keys.result(job_id)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), job_id, trace)
        self._waiting.setdefault(key, []).append(waiter)
        self._newcomers.add(key)
        try:
            self._wake()
            return await waiter.end
        finally:
            self._leave(key, waiter)

    async def close(self) -> None:
        """Ends every wait with a ``RuntimeError``."""
        self._closed = True
        self._fail_all(RuntimeError("the client was closed"))
        if self._task is not None:
            await cancelled(self._task)

    def _wake(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=TASK_NAME)
            self._task.add_done_callback(self._note_end)
        elif self._sleep is not None and not self._sleep.expired():
            self._sleep.reschedule(0)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Fails those who wait, unless the task ended by itself. The next waiter starts a new one.

        A callback is also called for a task that is cancelled before its first step.
        """
        error: BaseException | None
        if task.cancelled():
            error = RuntimeError(f"the task {TASK_NAME} was cancelled; wait again")
        else:
            error = task.exception()
        if task is self._task and error is not None:
            self._task = None
            self._fail_all(error)

    def _leave(self, key: str, waiter: _Waiter) -> None:
        waiters = self._waiting.get(key, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiting.pop(key, None)

    # The task ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        async with self._redis.pubsub() as pubsub:
            await self._listen(pubsub)

    async def _listen(self, pubsub: PubSub) -> None:
        heard_since_poll = 0
        poll_at_s = time.monotonic() + RESULT_POLL_S
        while True:
            due = time.monotonic() >= poll_at_s
            if due and not self._waiting:
                self._task = None
                return
            newcomers, self._newcomers = self._newcomers, set()
            # A job that has ended already needs no subscription.
            await self._look(newcomers)
            await self._subscribe(pubsub, newcomers)
            if due:
                if await self._look(self._waiting) and not heard_since_poll:
                    # The connection is open but brings nothing.
                    await pubsub.aclose()
                    await self._subscribe(pubsub, self._waiting)
                await self._find_lost()
                for some in _batches(key for key in pubsub.channels if key not in self._waiting):
                    await pubsub.unsubscribe(*some)
                heard_since_poll = 0
                poll_at_s = time.monotonic() + RESULT_POLL_S
            heard_since_poll += await self._hear(pubsub, poll_at_s - time.monotonic())

    async def _hear(self, pubsub: PubSub, timeout_s: float) -> int:
        """Waits for messages or new waiters, and returns the number of messages."""
        heard = 0
        named: set[str] = set()
        message: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(0 if self._newcomers else timeout_s) as self._sleep:
                if pubsub.subscribed:
                    message = await pubsub.get_message(timeout=None)
                else:
                    await asyncio.sleep(timeout_s)
        except TimeoutError:
            pass
        finally:
            self._sleep = None
        while message is not None:
            heard += 1
            # A message may be of a job of the same id in another database: only the key is this
            # job's. A confirmation also comes after a reconnect, before which messages may have
            # been missed.
            named.add(message["channel"])
            message = await pubsub.get_message(timeout=0) if heard < MOST_AT_ONCE else None
        await self._look(named)
        return heard

    async def _look(self, wanted: Iterable[str]) -> int:
        """Reads those of these results that have a waiter, and returns how many were found."""
        found = 0
        for some in _batches(key for key in wanted if key in self._waiting):
            for key, document in zip(some, await self._redis.mget(some), strict=True):
                found += document is not None and await self._settle(key, document)
        return found

    async def _find_lost(self) -> None:
        """Ends the waits for jobs that Redis has lost."""
        everyone = [waiter for waiters in self._waiting.values() for waiter in waiters]
        for first in range(0, len(everyone), MOST_AT_ONCE):
            some = everyone[first : first + MOST_AT_ONCE]
            async with self._redis.pipeline(transaction=False) as pipe:
                for waiter in some:
                    pipe.exists(keys.job(waiter.job_id))
                records = await pipe.execute()
            for waiter, exists in zip(some, records, strict=True):
                try:
                    waiter.trace.note(bool(exists))
                except JobLost as lost:
                    _tell(waiter.end, lost)

    async def _subscribe(self, pubsub: PubSub, wanted: Iterable[str]) -> None:
        for some in _batches(key for key in wanted if key in self._waiting):
            await pubsub.subscribe(*some)

    async def _settle(self, key: str, document: str | bytes) -> bool:
        """If this is the job's end, wakes its waiters; returns whether it is."""
        # Hundreds may come at once, and each takes milliseconds to decode.
        await asyncio.sleep(0)
        end: End | Exception | None
        try:
            end = decode_state(document).end
        except Exception as error:  # noqa: BLE001 - an unreadable result must fail only its own job
            end = error
        if end is None:
            return False
        for waiter in self._waiting.pop(key, ()):
            _tell(waiter.end, end)
        return True

    def _fail_all(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiters in waiting.values():
            for waiter in waiters:
                _tell(waiter.end, error)


def _batches(wanted: Iterable[str]) -> Iterator[list[str]]:
    # Copied, because the source may change meanwhile.
    left = iter(list(wanted))
    while some := list(islice(left, MOST_AT_ONCE)):
        yield some


def _tell(waiter: asyncio.Future[End], end: End | BaseException) -> None:
    if waiter.done():
        return
    if isinstance(end, BaseException) and not isinstance(end, LlorchError):
        waiter.set_exception(end)
    else:
        waiter.set_result(end)
