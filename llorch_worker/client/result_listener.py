"""Waiting for the results of any number of jobs over one connection to Redis."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice

import redis.asyncio
from redis.asyncio.client import PubSub

from llorch_worker.broker import keys
from llorch_worker.broker.results import decode_state
from llorch_worker.client.client import RESULT_POLL_S
from llorch_worker.contract import GenerationResult, LlorchError

MOST_LOOKED_AT = 500
"""Results asked for in one command: Redis answers nobody else meanwhile."""

End = GenerationResult | LlorchError


class ResultListener:
    """Hears of results by pub/sub and looks for them all the same, every ``RESULT_POLL_S``.

    Its task runs while somebody waits, and is the only one that touches the subscription:
    redis-py's connections are not safe to share between tasks.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._waiting: defaultdict[str, set[asyncio.Future[End]]] = defaultdict(set)
        """By the job's result key, which is also the name of its channel."""
        self._new: list[str] = []
        self._unlooked: set[str] = set()
        """What nobody has looked for since somebody waits for it: it may have ended before."""
        self._subscribed: set[str] = set()
        self._unconfirmed: set[str] = set()
        self._pubsub: PubSub | None = None
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Timeout | None = None

    async def end_of(self, job_id: str) -> End:
        """What the job ended with, once it has.

        Raises:
            RedisError: Redis does not answer.
            RuntimeError: the listener was closed.
        """
        key = keys.result(job_id)
        future: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._waiting[key].add(future)
        if key in self._subscribed:
            self._unlooked.add(key)
        else:
            self._new.append(key)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._listen())
        else:
            self._interrupt()
        try:
            return await future
        finally:
            self._leave(key, future)

    async def close(self) -> None:
        """Nobody hears any more; who still waits is told so."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail(RuntimeError("the client was closed"))
        await self._drop_subscription()

    def _leave(self, key: str, future: asyncio.Future[End]) -> None:
        futures = self._waiting[key]
        futures.discard(future)
        if not futures:
            del self._waiting[key]
        if not self._waiting:
            self._interrupt()

    def _interrupt(self) -> None:
        """The task looks up from its reading."""
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())
            self._reading = None

    # The task ------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        try:
            if self._pubsub is None:
                self._pubsub = self._redis.pubsub()
            await self._hear(self._pubsub)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            # Whoever comes from now on begins anew.
            self._task = None
            self._fail(error)
            await self._drop_subscription()

    async def _hear(self, pubsub: PubSub) -> None:
        await self._unsubscribe(pubsub)
        look_at_s = time.monotonic() + RESULT_POLL_S
        while self._waiting:
            if self._new:
                await self._subscribe(pubsub)
            elif self._unlooked and not self._unconfirmed:
                unlooked, self._unlooked = self._unlooked, set()
                await self._look(unlooked)
            elif time.monotonic() > look_at_s:
                await self._look(tuple(self._waiting))
                await self._unsubscribe(pubsub)
                look_at_s = time.monotonic() + RESULT_POLL_S
            else:
                await self._read(pubsub, look_at_s - time.monotonic())

    async def _subscribe(self, pubsub: PubSub) -> None:
        new, self._new = set(self._new) & self._waiting.keys(), []
        if new:
            self._subscribed |= new
            self._unconfirmed |= new
            await pubsub.subscribe(*new)

    async def _read(self, pubsub: PubSub, timeout_s: float) -> None:
        message = None
        try:
            async with asyncio.timeout(None) as self._reading:
                message = await pubsub.get_message(timeout=max(0.0, timeout_s))
        except TimeoutError:
            pass  # Interrupted.
        finally:
            self._reading = None
        match message:
            case {"type": "message", "channel": str(key), "data": str(document)}:
                self._settle(key, document)
            case {"type": "subscribe", "channel": str(key)}:
                # Also after a reconnect. What was published before may have been missed.
                self._unconfirmed.discard(key)
                self._unlooked.add(key)

    async def _look(self, wanted: Iterable[str]) -> None:
        left = iter([key for key in wanted if key in self._waiting])
        while some := list(islice(left, MOST_LOOKED_AT)):
            for key, document in zip(some, await self._redis.mget(some), strict=True):
                if document is not None:
                    self._settle(key, document)

    async def _unsubscribe(self, pubsub: PubSub) -> None:
        """From what nobody waits for any more."""
        left = self._subscribed - self._waiting.keys()
        if left:
            self._subscribed -= left
            self._unconfirmed -= left
            await pubsub.unsubscribe(*left)

    async def _drop_subscription(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        self._subscribed, self._unconfirmed = set(), set()
        if pubsub is not None:
            await pubsub.aclose()

    def _settle(self, key: str, document: str | bytes) -> None:
        futures = [each for each in self._waiting.get(key, ()) if not each.done()]
        if not futures:
            return
        try:
            end = decode_state(document).end
        except Exception as error:  # noqa: BLE001 - what cannot be read is this job's alone
            for future in futures:
                future.set_exception(error)
            return
        if end is not None:
            for future in futures:
                future.set_result(end)

    def _fail(self, error: Exception) -> None:
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
