"""redis-py's client without the bookkeeping around each command."""

from __future__ import annotations

import os
import select
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

import redis
from redis.exceptions import ResponseError


class LeanRedis(redis.Redis):
    """Keeps the connection of a command for the next one; thread-safe.

    redis-py borrows one from its pool for every command, and notes that, the return and the
    duration for metrics. Right after a step of a model, when no cache of the processor holds any
    of that code, it shows in the time of a job alone: ``python -m benches.redis_command``.
    Retries and the handling of replies are redis-py's. Pipelines and subscriptions use the pool as
    ever; so does a command after a failure, because it is the pool that connects anew (and asks
    Sentinel where to).

    Not for client-side caching, nor for credentials that are renewed while a connection is open:
    redis-py sees to both when a connection returns to its pool.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # By process: in a fork the parent's connections stay the parent's.
        self._kept: dict[int, deque[Any]] = {}

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if self.connection is not None:
            # This client is bound to one connection.
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        connection = self._take()
        try:
            reply = connection.retry.call_with_retry(
                partial(self._ask, connection, args, options),
                lambda _error: connection.disconnect(),
            )
        except ResponseError:
            self._keep(connection)
            raise
        except BaseException:
            # Its answer may still come, and would be taken for the next command's.
            connection.disconnect()
            self.connection_pool.release(connection)
            raise
        self._keep(connection)
        return reply

    def close(self) -> None:
        self._release_idle()
        super().close()

    def close_idle(self) -> None:
        """As :meth:`close`, but for what another thread reads from at this moment.

        To close a socket under a thread that polls it may leave the thread there until its timeout.
        """
        self._release_idle()
        self.connection_pool.disconnect(inuse_connections=False)

    def _release_idle(self) -> None:
        # redis-py also closes what it could not quite open.
        idle = getattr(self, "_kept", {}).get(os.getpid(), deque())
        # Two threads may empty it.
        with suppress(IndexError):
            while True:
                self.connection_pool.release(idle.pop())

    def _ask(self, connection: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        connection.send_command(*args)
        # Unpacked for each try: it takes out of the options what it has used.
        return self.parse_response(connection, args[0], **options)  # type: ignore[no-untyped-call]

    def _take(self) -> Any:
        try:
            connection = self._idle().pop()
        except IndexError:
            return self.connection_pool.get_connection()
        if not _is_fit(connection):
            self.connection_pool.release(connection)
            connection = self.connection_pool.get_connection()
        return connection

    def _keep(self, connection: Any) -> None:
        self._idle().append(connection)

    def _idle(self) -> deque[Any]:
        return self._kept.setdefault(os.getpid(), deque())


def _is_fit(connection: Any) -> bool:
    """Whether it is open and nothing is to be read: between two commands only the end could be."""
    if connection._sock is None or connection.should_reconnect():
        return False
    poll = select.poll()
    poll.register(connection._sock, select.POLLIN)
    return not poll.poll(0)
