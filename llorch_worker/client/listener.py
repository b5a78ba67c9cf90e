"""Waiting for the results and the events of any number of jobs over one connection to Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.jobs.results import StoredState, decode_state
from llorch_worker.broker.scripts import database
from llorch_worker.client.cancelling import cancelled
from llorch_worker.client.client import RESULT_POLL_S
from llorch_worker.client.feed import Feed
from llorch_worker.client.lost import Trace, waits_or_runs
from llorch_worker.client.patience import RETRY_S
from llorch_worker.contract import JobLost, JobResult, LlorchError

MOST_AT_ONCE = 500
"""Keys per command, because Redis serves no one else during a command."""
SMALL_CHARS = 2**15
"""The longest result that is decoded on the event loop; longer ones are decoded in a thread."""
MOST_DECODED = 16
"""Longer ones that wait to be decoded. They take memory, so that with more nothing is read."""
MOST_HEARD_AT_ONCE = 100
"""Messages that are read before other tasks run."""
MOST_SILENT_POLLS = 4
"""So many times the listener asks over its subscription without an answer before it makes another.
"""
LINGER_S = 30.0
"""How long the connection stays for the next waiter after the last has left."""
TASK_NAME = "llorch-listener"

End = JobResult | LlorchError
Item = TypeVar("Item")


class _Waiter:
    """Waits for the result of a job."""

    def __init__(self, job_id: str, trace: Trace, patience_s: float) -> None:
        self.job_id = job_id
        self.patience_s = patience_s
        self.since_s = time.monotonic()
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._trace = trace

    def tell(self, end: End) -> None:
        if not self.end.done():
            self.end.set_result(end)

    def fail(self, error: BaseException) -> None:
        if not self.end.done():
            self.end.set_exception(error)

    def note(self, found: bool) -> None:
        """Notes whether the job waits or runs."""
        try:
            self._trace.note(found)
        except JobLost as lost:
            self.tell(lost)


class Listener:
    """Hears of results and of streams by pub/sub, and also polls every ``RESULT_POLL_S``, in few
    round trips for all.

    One task serves all waiters and alone uses the subscription: redis-py's breaks if one task
    subscribes while another's read reconnects.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._results: dict[str, list[_Waiter]] = {}
        """By the job's result key, which is also the name of its channel."""
        self._feeds: dict[str, list[Feed]] = {}
        """By the channel of the stream."""
        self._newcomers: set[str] = set()
        """The channels that the task has not seen yet."""
        self._away_since_s: float | None = None
        """Since when Redis does not answer."""
        self._decoding: dict[str, asyncio.Task[None]] = {}
        """By the keys of long results."""
        self._one = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._sleep: asyncio.Timeout | None = None
        self._closed = False

    async def end_of(self, job_id: str, trace: Trace, patience_s: float = 0.0) -> End:
        """Waits for the end of the job; ``JobLost`` if Redis has lost it.

        Raises:
            RedisError: Redis has not answered for ``patience_s``.
            RuntimeError: the listener was closed.
        """
        waiter = _Waiter(job_id, trace, patience_s)
        with self._waiting(self._results, keys.result(job_id), waiter):
            return await waiter.end

    @contextmanager
    def following(self, job_id: str, patience_s: float = 0.0) -> Iterator[Feed]:
        """Feeds a reader of the job's stream. Waiting for it raises like :meth:`end_of`."""
        feed = Feed(job_id, patience_s)
        channel = keys.events_channel(database(self._redis), job_id)
        with self._waiting(self._feeds, channel, feed):
            yield feed

    async def close(self) -> None:
        """Ends every wait with a ``RuntimeError``."""
        self._closed = True
        self._fail_all(RuntimeError("the client was closed"))
        await cancelled(*([] if self._task is None else [self._task]), *self._decoding.values())

    @contextmanager
    def _waiting(
        self, waiting: dict[str, list[Item]], channel: str, waiter: Item
    ) -> Iterator[None]:
        if self._closed:
            raise RuntimeError("the client was closed")
        waiting.setdefault(channel, []).append(waiter)
        self._newcomers.add(channel)
        try:
            self._wake()
            yield
        finally:
            waiters = waiting.get(channel, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                waiting.pop(channel, None)

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

    def _everyone(self) -> list[_Waiter | Feed]:
        results = (waiter for waiters in self._results.values() for waiter in waiters)
        return [*results, *(feed for feeds in self._feeds.values() for feed in feeds)]

    def _fail_all(self, error: BaseException) -> None:
        for waiter in self._everyone():
            waiter.fail(error)
        self._results, self._feeds = {}, {}

    # The task ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    self._newcomers = {*self._results, *self._feeds}
                    return await self._listen(pubsub)
            except RedisError as error:
                self._note_outage(error)
            await asyncio.sleep(RETRY_S)

    def _note_outage(self, error: RedisError) -> None:
        """Fails those whose patience is over."""
        now_s = time.monotonic()
        self._away_since_s = self._away_since_s or now_s
        for waiter in self._everyone():
            if now_s - max(self._away_since_s, waiter.since_s) >= waiter.patience_s:
                waiter.fail(error)

    async def _listen(self, pubsub: PubSub) -> None:
        """Until nobody has waited for long."""
        silent_polls = 0
        last_waiter_s = time.monotonic()
        poll_at_s = last_waiter_s + RESULT_POLL_S
        while True:
            now_s = time.monotonic()
            if self._results or self._feeds:
                last_waiter_s = now_s
            elif now_s >= last_waiter_s + LINGER_S:
                self._task = None
                return
            newcomers, self._newcomers = self._newcomers, set()
            # A job that has ended already needs no subscription.
            await self._look(newcomers)
            await self._subscribe(pubsub, newcomers)
            if now_s >= poll_at_s:
                found = await self._poll()
                if (silent_polls and found) or silent_polls >= MOST_SILENT_POLLS:
                    # The connection is open but brings nothing.
                    await pubsub.aclose()
                    await self._subscribe(pubsub, [*self._results, *self._feeds])
                    silent_polls = 0
                for some in _batches(each for each in pubsub.channels if not self._is_wanted(each)):
                    await pubsub.unsubscribe(*some)
                if pubsub.subscribed:
                    await pubsub.ping()
                    silent_polls += 1
                poll_at_s = time.monotonic() + RESULT_POLL_S
            self._away_since_s = None
            if await self._hear(pubsub, poll_at_s - time.monotonic()):
                silent_polls = 0

    def _is_wanted(self, channel: str) -> bool:
        return channel in self._results or channel in self._feeds

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
            for feed in self._feeds.get(message["channel"], ()):
                if message["type"] == "message":
                    feed.take(message["data"])
                elif message["type"] == "subscribe":
                    # It also comes after a reconnect, before which messages may have been missed.
                    feed.look()
            # A message may be of a job of the same id in another database: only the key is this
            # job's.
            named.add(message["channel"])
            message = await pubsub.get_message(timeout=0) if heard < MOST_HEARD_AT_ONCE else None
        await self._look(named)
        if heard:
            await asyncio.sleep(0)
        return heard

    async def _look(self, wanted: Iterable[str]) -> int:
        """Reads those of these results that have a waiter, and returns how many were found."""
        found = 0
        waiting = self._results.keys() - self._decoding.keys()
        for some in _batches(key for key in wanted if key in waiting):
            for key, document in zip(some, await self._redis.mget(some), strict=True):
                found += document is not None and await self._settle(key, document)
        return found

    async def _poll(self) -> int:
        """Looks for ends and for lost jobs. Returns how many ends were found, which had not been
        heard of."""
        found = await self._look(self._results)
        quiet = [feed for feeds in self._feeds.values() for feed in feeds if feed.was_quiet()]
        for feeds in _batches(quiet):
            documents = await self._redis.mget([keys.result(feed.job_id) for feed in feeds])
            for feed, document in zip(feeds, documents, strict=True):
                if document is not None and _is_end(document):
                    feed.look()
                    found += 1
        for some in _batches(quiet):
            records = [keys.job(feed.job_id) for feed in some]
            if await self._redis.exists(*records) == len(records):
                exist = [True] * len(records)
            else:
                async with self._redis.pipeline(transaction=False) as pipe:
                    for record in records:
                        pipe.exists(record)
                    exist = [bool(each) for each in await pipe.execute()]
            for feed, exists in zip(some, exist, strict=True):
                feed.note(exists)
        await self._note_lost()
        return found

    async def _note_lost(self) -> None:
        """Asks for the jobs whose results are waited for. One that is decoded now was found."""
        found = self._decoding
        waiting = [each for key in self._results.keys() - found for each in self._results[key]]
        for some in _batches(waiting):
            async with self._redis.pipeline(transaction=False) as pipe:
                for waiter in some:
                    pipe.hmget(keys.job(waiter.job_id), "state", "sent")
                for waiter, (mark, sent) in zip(some, await pipe.execute(), strict=True):
                    waiter.note(waits_or_runs(mark, sent))

    async def _subscribe(self, pubsub: PubSub, wanted: Iterable[str]) -> None:
        for some in _batches(channel for channel in wanted if self._is_wanted(channel)):
            await pubsub.subscribe(*some)

    async def _settle(self, key: str, document: str | bytes) -> bool:
        """If this is the job's end, wakes its waiters; returns whether it is. A long one is, and
        they are woken when it is decoded: until then others hear of their own."""
        if len(document) <= SMALL_CHARS:
            # Hundreds may come at once, and each takes milliseconds to decode.
            await asyncio.sleep(0)
            return await self._tell(key, document)
        if len(self._decoding) >= MOST_DECODED:
            await asyncio.wait(self._decoding.values(), return_when=asyncio.FIRST_COMPLETED)
        self._decoding[key] = asyncio.create_task(self._tell_long(key, document))
        return True

    async def _tell_long(self, key: str, document: str | bytes) -> None:
        try:
            # The event loop would wait for each of several threads.
            async with self._one:
                await self._tell(key, document)
        finally:
            del self._decoding[key]

    async def _tell(self, key: str, document: str | bytes) -> bool:
        """Wakes the waiters of a job that ends so; returns whether it does."""
        try:
            end = (await decoded(document)).end
        except Exception as error:  # noqa: BLE001 - an unreadable result must fail only its own job
            for waiter in self._results.pop(key, ()):
                waiter.fail(error)
            return True
        if end is None:
            return False
        for waiter in self._results.pop(key, ()):
            waiter.tell(end)
        return True


async def decoded(document: str | bytes | None) -> StoredState:
    """Like :func:`decode_state`, beside the event loop if it takes long."""
    if document is None or len(document) <= SMALL_CHARS:
        return decode_state(document)
    return await asyncio.to_thread(decode_state, document)


def _is_end(document: str | bytes) -> bool:
    """Also of what cannot be read: who looks at it raises that. A long one is."""
    try:
        return len(document) > SMALL_CHARS or decode_state(document).end is not None
    except Exception:  # noqa: BLE001
        return True


def _batches(wanted: Iterable[Item]) -> Iterator[list[Item]]:
    # Copied, because the source may change meanwhile.
    left = iter(list(wanted))
    while some := list(islice(left, MOST_AT_ONCE)):
        yield some
