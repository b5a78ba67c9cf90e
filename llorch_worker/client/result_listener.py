"""Waiting for the results of any number of jobs over one connection to Redis."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

import redis
from redis.client import PubSub
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.results import decode_state
from llorch_worker.client.client import RESULT_POLL_S
from llorch_worker.contract import GenerationResult, LlorchError

MOST_AT_ONCE = 500
"""Results asked for in one command, during which Redis answers nobody else; and messages read
before newcomers have their turn."""
CLOSE_TIMEOUT_S = 1.0

End = GenerationResult | LlorchError
_Waiter = asyncio.Future[End]


class ResultListener:
    """Hears of results by pub/sub, and looks for them all the same every ``RESULT_POLL_S``.

    One thread does so for all who wait, on whatever event loop, and nobody else touches its
    subscription. It lives while somebody waits, and a moment longer.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._lock = threading.Lock()
        self._waiting: dict[str, list[_Waiter]] = {}
        """By the job's result key, which is also the name of its channel."""
        self._newcomers: set[str] = set()
        """Of these keys, those that the thread has not seen yet."""
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    async def end_of(self, job_id: str) -> End:
        """What the job ended with, once it has.

        Raises:
            RedisError: Redis does not answer.
            RuntimeError: the listener was closed.
        """
        key = keys.result(job_id)
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        self._enter(key, waiter)
        try:
            return await waiter
        finally:
            self._leave(key, waiter)

    def close(self) -> None:
        """Nobody hears any more; who still waits is told so."""
        with self._lock:
            self._closed, thread = True, self._thread
            self._fail_all(RuntimeError("the client was closed"))
        self._wake()
        if thread is not None:
            # It may wait for a Redis that does not answer.
            thread.join(CLOSE_TIMEOUT_S)
        if thread is None or not thread.is_alive():
            self._wake_reader.close()
            self._wake_writer.close()

    def _enter(self, key: str, waiter: _Waiter) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client was closed")
            self._waiting.setdefault(key, []).append(waiter)
            self._newcomers.add(key)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="llorch-results", daemon=True)
                thread.start()
                self._thread = thread
        self._wake()

    def _leave(self, key: str, waiter: _Waiter) -> None:
        with self._lock:
            waiters = self._waiting.get(key, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._waiting.pop(key, None)

    def _wake(self) -> None:
        # Full means that the thread has not looked for long: it will. Closed, that nobody waits.
        with suppress(OSError):
            self._wake_writer.send(b"\0")

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with closing(self._redis.pubsub()) as pubsub:
                self._listen(pubsub)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            with self._lock:
                if self._thread is threading.current_thread():
                    # Whoever comes from now on begins anew.
                    self._thread = None
                    self._fail_all(error)

    def _listen(self, pubsub: PubSub) -> None:
        heard_since_poll = 0
        poll_at_s = time.monotonic() + RESULT_POLL_S
        while True:
            due = time.monotonic() >= poll_at_s
            with self._lock:
                if self._closed or (due and not self._waiting):
                    self._thread = None
                    return
                newcomers, self._newcomers = self._newcomers, set()
            # What is asked for late has ended: no need to listen.
            self._look(newcomers)
            self._subscribe(pubsub, newcomers)
            if due:
                if self._look(self._waiting.copy()) and not heard_since_poll:
                    # The connection is as good as lost, though nobody says so.
                    pubsub.close()
                    self._subscribe(pubsub, self._waiting.copy())
                self._unsubscribe(pubsub)
                heard_since_poll = 0
                poll_at_s = time.monotonic() + RESULT_POLL_S
            heard = self._hear(pubsub)
            heard_since_poll += heard
            if heard < MOST_AT_ONCE:
                self._sleep(pubsub, poll_at_s - time.monotonic())

    def _hear(self, pubsub: PubSub) -> int:
        """Reads what is there already, within reason; how many messages it was."""
        heard, confirmed = 0, set()
        while heard < MOST_AT_ONCE and (message := pubsub.get_message(timeout=0)) is not None:
            heard += 1
            match message:
                case {"type": "message", "channel": str(key), "data": str(document)}:
                    self._settle(key, document)
                case {"type": "subscribe", "channel": str(key)}:
                    # Also after a reconnect. What was published before may have been missed.
                    confirmed.add(key)
        self._look(confirmed)
        return heard

    def _sleep(self, pubsub: PubSub, timeout_s: float) -> None:
        sources = [self._wake_reader]
        connection: Any = pubsub.connection
        if connection is not None:
            with suppress(RedisError):
                if connection.can_read(timeout=0):
                    return
                sources.append(connection._sock)
        wait(sources, max(0.0, timeout_s))
        with suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass

    def _look(self, wanted: Iterable[str]) -> int:
        """Asks for these results, where somebody waits; how many there were."""
        found = 0
        for some in _batches(key for key in wanted if key in self._waiting):
            for key, document in zip(some, self._redis.mget(some), strict=True):
                found += document is not None and self._settle(key, document)
        return found

    def _subscribe(self, pubsub: PubSub, wanted: Iterable[str]) -> None:
        for some in _batches(key for key in wanted if key in self._waiting):
            pubsub.subscribe(*some)

    def _unsubscribe(self, pubsub: PubSub) -> None:
        """From what nobody waits for any more."""
        for some in _batches(key for key in pubsub.channels if key not in self._waiting):
            pubsub.unsubscribe(*some)

    def _settle(self, key: str, document: str | bytes) -> bool:
        """Tells those who wait for this job, if that is its end; whether it is."""
        try:
            end: End | Exception | None = decode_state(document).end
        except Exception as error:  # noqa: BLE001 - what cannot be read is this job's alone
            end = error
        if end is None:
            return False
        with self._lock:
            for waiter in self._waiting.pop(key, ()):
                _tell(waiter, end)
        return True

    def _fail_all(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiters in waiting.values():
            for waiter in waiters:
                _tell(waiter, error)


def _batches(wanted: Iterable[str]) -> Iterator[list[str]]:
    # Taken at once: what they are picked from may change meanwhile.
    left = iter(list(wanted))
    while some := list(islice(left, MOST_AT_ONCE)):
        yield some


def _tell(waiter: _Waiter, end: End | Exception) -> None:
    def tell() -> None:
        if waiter.done():
            return
        if isinstance(end, Exception) and not isinstance(end, LlorchError):
            waiter.set_exception(end)
        else:
            waiter.set_result(end)

    # A loop that is closed has nobody who waits.
    with suppress(RuntimeError):
        waiter.get_loop().call_soon_threadsafe(tell)
