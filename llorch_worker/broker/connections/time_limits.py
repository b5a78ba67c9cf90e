"""Connections with limits: to be greeted, on each reply, on a command with all its retries.

redis-py's wait as long for the first reply as for any other, and each retry of a command connects
several times. A server that accepts connections and never answers would hold a command for minutes.
The first connection to a server also says what listens there if the URL does not fit it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio.connection
import redis.connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import InvalidResponse
from redis.exceptions import TimeoutError as NoReply
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

CONNECT_TIMEOUT_S = 3.0
"""For a connection, and again for what is said on it before the first command."""
REPLY_TIMEOUT_S = 8.0
"""Longer than any command of ours blocks."""
LAST_TRY_S = 6.5
"""A command that found no answer for so long is not sent again."""
PROBE_TIMEOUT_S = 1.0
_PROBED_ERRORS = (NoConnection, NoReply, InvalidResponse)
CONNECTING_AT_ONCE = 32
"""Of one client. What makes hundreds of connections at once shares its time among their
greetings, and none would be over in time."""
LOOK_UP_S = 1.0
"""How often a connection that waits for its slot looks whether others are greeted."""
_GREETED: set[tuple[str, int]] = set()
"""Where a Redis has answered this process. If it stops, it is away."""


_CONTEXTS: dict[tuple[Any, ...], Any] = {}
"""Of TLS for asyncio, by its options and the age of the files that they name."""


class NotThisRedis(NoConnection):
    """What listens there is no Redis, or not one that the URL fits."""


class _OutOfTime:
    """Ends the retries of redis-py's ``Retry``, whose calls are nested: a command connects."""

    _until_s: float | None = None

    def _begin(self) -> tuple[float, bool]:
        """When no further try may begin, and whether this call is the outermost."""
        if self._until_s is not None:
            return self._until_s, False
        self._until_s = time.monotonic() + LAST_TRY_S
        return self._until_s, True


def _is_last(error: Exception, until_s: float) -> bool:
    if isinstance(error, NotThisRedis):
        return True
    # A connection that was lost after a long wait is made again.
    return isinstance(error, NoReply | MasterNotFoundError) and time.monotonic() >= until_s


class LimitedRetry(_OutOfTime, Retry):
    """A retry that ends in time."""

    def call_with_retry(self, do: Any, fail: Any, *args: Any, **options: Any) -> Any:
        until_s, outermost = self._begin()

        def failed(error: Exception, *count: int) -> None:
            fail(error, *count)
            if _is_last(error, until_s):
                raise error

        try:
            return super().call_with_retry(do, failed, *args, **options)
        finally:
            if outermost:
                self._until_s = None


class AsyncLimitedRetry(_OutOfTime, AsyncRetry):
    """:class:`LimitedRetry` for asyncio."""

    async def call_with_retry(
        self, do: Callable[[], Awaitable[Any]], fail: Any, *args: Any, **options: Any
    ) -> Any:
        until_s, outermost = self._begin()

        async def failed(error: Exception, *count: int) -> None:
            await fail(error, *count)
            if _is_last(error, until_s):
                raise error

        try:
            return await super().call_with_retry(do, failed, *args, **options)
        finally:
            if outermost:
                self._until_s = None


class Limited:
    """A mixin for redis-py's connections. They send no PING before the greeting, with retries of
    its own: the greeting shows as much."""

    def connect_check_health(self: Any, *_: Any, **options: Any) -> None:
        if self.is_connected:
            return
        reply_timeout_s, self.socket_timeout = self.socket_timeout, self.socket_connect_timeout
        try:
            super().connect_check_health(**options | {"check_health": False})  # type: ignore[misc]
        except _PROBED_ERRORS as error:
            if _may_be_another(self, error) and (found := _found_by(self, error)):
                raise NotThisRedis(found) from error
            raise
        finally:
            self.socket_timeout = reply_timeout_s
        self.update_current_socket_timeout(-1)  # to that of the connection
        _GREETED.add(_place(self))


class LimitedConnection(Limited, redis.connection.Connection):
    pass


class LimitedSSLConnection(Limited, redis.connection.SSLConnection):
    pass


class LimitedUnixConnection(Limited, redis.connection.UnixDomainSocketConnection):
    pass


class Greetings:
    """Lets a few of one client's connections be greeted at a time."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(CONNECTING_AT_ONCE)
        self._greeted = 0

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Waits for a slot as long as others are greeted.

        Raises: NoReply if none was for ``CONNECT_TIMEOUT_S``.
        """
        # It keeps its place among those who wait, however often this looks up.
        slot = asyncio.ensure_future(self._free.acquire())
        silent_s = 0.0
        try:
            while not slot.done():
                greeted = self._greeted
                await asyncio.wait({slot}, timeout=LOOK_UP_S)
                # However long a busy loop takes, it counts once: it could not hear a greeting.
                silent_s = silent_s + LOOK_UP_S if greeted == self._greeted else 0.0
                if silent_s >= CONNECT_TIMEOUT_S and not slot.done():
                    raise NoReply("Timeout connecting to server")
            yield
            self._greeted += 1
        finally:
            if not slot.cancel():
                self._free.release()


class AsyncLimited:
    """:class:`Limited` for asyncio. ``greetings`` are those of its client."""

    def __init__(self, *args: Any, greetings: Greetings, **options: Any) -> None:
        super().__init__(*args, **options)
        self._greetings = greetings

    async def connect_check_health(self: Any, *_: Any, **options: Any) -> None:
        if self.is_connected:
            return
        reply_timeout_s, self.socket_timeout = self.socket_timeout, self.socket_connect_timeout
        try:
            async with self._greetings.take():
                await super().connect_check_health(**options | {"check_health": False})  # type: ignore[misc]
        except _PROBED_ERRORS as error:
            if _may_be_another(self, error) and (
                found := await asyncio.to_thread(_found_by, self, error)
            ):
                raise NotThisRedis(found) from error
            raise
        finally:
            self.socket_timeout = reply_timeout_s
        _GREETED.add(_place(self))

    async def send_packed_command(self: Any, *args: Any, **options: Any) -> None:
        task = asyncio.current_task()
        asked = task.cancelling() if task else 0
        await super().send_packed_command(*args, **options)  # type: ignore[misc]
        if task and task.cancelling() > asked:
            # Before Python 3.12, asyncio.wait_for loses a cancellation that comes as it ends.
            await self.disconnect(nowait=True)
            raise asyncio.CancelledError

    async def disconnect(self: Any, *args: Any, **options: Any) -> None:
        # The peer need not answer: a connection whose end it does not confirm in time is cut.
        writer = self._writer
        try:
            await super().disconnect(*args, **options)  # type: ignore[misc]
        except NoReply:
            if writer is not None:
                writer.transport.abort()


class AsyncLimitedConnection(AsyncLimited, redis.asyncio.connection.Connection):
    pass


class AsyncLimitedSSLConnection(AsyncLimited, redis.asyncio.connection.SSLConnection):
    """redis-py reads all trusted certificates for each connection, which takes 10 ms of the event
    loop. Hundreds of readers that connect at once would find no time for their greetings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
        files = (
            value for value in tls.values() if isinstance(value, str) and os.path.isfile(value)
        )
        # Certificates are replaced before they expire.
        key = (*sorted(tls.items()), *map(os.path.getmtime, files))
        self.ssl_context = _CONTEXTS.setdefault(key, self.ssl_context)


class AsyncLimitedUnixConnection(AsyncLimited, redis.asyncio.connection.UnixDomainSocketConnection):
    pass


def _place(connection: Any) -> tuple[str, int]:
    path = getattr(connection, "path", None)
    return (path, 0) if path else (connection.host, connection.port)


def _may_be_another(connection: Any, error: Exception) -> bool:
    # Other classes of errors are replies of a Redis.
    return type(error) in _PROBED_ERRORS and _place(connection) not in _GREETED


def _found_by(connection: Any, error: Exception) -> str | None:
    """What listens in place of the Redis of this connection, in words; None if nothing new."""
    host, port = _place(connection)
    encrypts = isinstance(
        connection, redis.connection.SSLConnection | redis.asyncio.connection.SSLConnection
    )
    if not port:
        return "it accepts connections and never answers" if isinstance(error, NoReply) else None
    try:
        with socket.create_connection((host, port), PROBE_TIMEOUT_S) as probe:
            probe.sendall(b"PING\r\n")
            answer = _read(probe)
        if answer is not None and answer.startswith(b"HTTP/"):
            return "an HTTP server answers there"
        if encrypts:
            if answer is not None and answer.startswith((b"+", b"-")):
                return "it answers without TLS, so use redis://"
        elif answer is not None and _speaks_tls(host, port):
            return "it answers with TLS only, so use rediss://"
    except OSError:
        return None
    if answer is None and isinstance(error, NoReply):
        return "it accepts connections and never answers"
    return None


def _read(probe: socket.socket) -> bytes | None:
    """What it sends first, "" if it hangs up, None if nothing comes."""
    try:
        return probe.recv(64)
    except TimeoutError:
        return None
    except OSError:
        return b""


def _speaks_tls(host: str, port: int) -> bool:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), PROBE_TIMEOUT_S) as probe,
            trusting.wrap_socket(probe, server_hostname=host),
        ):
            return True
    except OSError as error:
        # It asks for a certificate of ours, for example.
        return isinstance(error, ssl.SSLError) and "ALERT" in str(error).upper()
