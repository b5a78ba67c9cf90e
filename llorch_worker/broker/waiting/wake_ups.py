"""Wake-ups: how one job wakes one worker.

Each queue has a wake key, a Redis list (``keys.wake``). A worker with room that found no more jobs
waits at the wake keys of its queues with BLPOP. Redis serves those that wait in the order in which
they came, one for each wake-up. A wake-up holds no job: the woken worker claims, with
``lua/claim.lua``. So no job is ever in nobody's hands, and a wake-up that dies with its worker
costs only time.

A worker without room waits for high jobs alone, which it may claim beyond its room. They send a
wake-up to a second key (``keys.full_wake``) together with the first. Such a worker claims only if
the first is still there: otherwise a worker with room has taken it, and claims the job itself.

A worker whose model generates and reads texts claims each kind by itself. For texts it waits at
keys of their own. The model's card decides whether a job that reads texts sends its wake-up there
or to the common keys: a claim of one kind looks at no other. What lies in the inbox wakes as what
generates does, and whoever finds a text there wakes for it.

Who pushes a job sends a wake-up in the same script, or a worker does it for him: see
:mod:`.inbox_watch`. One that comes between a worker's look and its BLPOP stays in the list, which
holds one at most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

ANSWER_S = 1.0
"""How long the end of a wait may take, before its connection is taken for dead."""
ASK_AGAIN_S = 0.02
"""A wait whose command arrives after that which ends it is ended by the next."""


class WakeUps:
    """A worker's wait for them, on a connection that does nothing else."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._connection: Any = None
        self._id: int | None = None
        """By which Redis knows the connection; None if it does not say."""
        self.keys: tuple[str, ...] = ()
        """Those that it waits for now."""

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Begins to wait; :meth:`fileno` becomes readable at a wake-up, or after ``timeout_s``."""
        if self._connection is None:
            self._connect()
        try:
            # No health check: its PING would take the reply.
            command = ("BLPOP", *keys, f"{timeout_s:.3f}")
            self._connection.send_command(*command, check_health=False)
        except RedisError:
            self.close()
            raise
        self.keys = tuple(keys)

    def fileno(self) -> int:
        """The socket, while it waits."""
        number: int = self._connection._sock.fileno()
        return number

    def has_answer(self, within_s: float = 0.0) -> bool:
        """Whether :meth:`read` need not wait."""
        return bool(self._connection.can_read(timeout=within_s))

    def read(self) -> bool:
        """Ends a wait whose reply has arrived; whether by a wake-up."""
        self.keys = ()
        try:
            return self._connection.read_response() is not None
        except RedisError:
            # A server that becomes a replica says so, and then closes the connection.
            self.close()
            raise

    def leave(self) -> bool:
        """Ends a wait, if there is one, by a command on another connection; whether a
        wake-up came meanwhile."""
        give_up_s = time.monotonic() + ANSWER_S
        try:
            while self.keys and self._id is not None and time.monotonic() < give_up_s:
                self._client.client_unblock(self._id)
                if self.has_answer(ASK_AGAIN_S):
                    return self.read()
        except RedisError:
            pass
        # A wake-up may just have reached it.
        waited = bool(self.keys)
        if waited:
            self.close()
        return waited

    def close(self) -> None:
        self.keys = ()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._client.connection_pool.release(connection)

    def _connect(self) -> None:
        self._connection = self._client.connection_pool.get_connection()
        try:
            self._connection.send_command("CLIENT", "ID", check_health=False)
            self._id = self._connection.read_response()
        except ResponseError:
            self._id = None
        except RedisError:
            self.close()
            raise
