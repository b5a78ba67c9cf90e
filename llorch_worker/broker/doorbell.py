"""Doorbells: how one job wakes one worker.

Each queue has a bell, a Redis list (``keys.bell``). A worker with room that found no more jobs
waits for the bells of its queues with BLPOP. Redis serves those that wait in the order in which
they came, one for each ring. A ring holds no job: the woken worker looks, with ``lua/claim.lua``.
So no job is ever in nobody's hands, and a ring that dies with its worker costs only time.

A worker without room waits for high jobs alone, which it may claim beyond its room. They ring a
second bell (``keys.full_bell``) together with the first. Such a worker claims only if the ring
of the first is still there: otherwise a worker with room has taken it, and claims the job itself.

Who pushes a job rings in the same script, or a worker rings for it: see :mod:`.watch`. A ring that
comes between a worker's look and its BLPOP stays in the list, which holds one ring at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

UNBLOCK_S = 0.01
"""How long the reply to a wait may take before it is ended once more."""
UNBLOCK_TIMES = 100
"""How often, before the connection is taken for dead."""


class Doorbell:
    """A worker's wait on a connection that does nothing else."""

    def __init__(self) -> None:
        self._socket: Any = None
        """The socket whose client id is known."""
        self._client_id = 0
        self._waiting_on: Any = None
        self.has_rung = False
        """Whether a bell has rung since the last claim; whoever claims sets it back."""

    def waits(self, connection: Any) -> bool:
        return self._waiting_on is not None and self._waiting_on is connection._sock

    def wait(self, connection: Any, bells: Sequence[str], timeout_s: float) -> None:
        """Begins to wait; the connection becomes readable at a ring, or after ``timeout_s``."""
        if self._socket is not connection._sock:
            self._client_id = _client_id(connection)
            self._socket = connection._sock
        # No health check: its PING would take the reply.
        connection.send_command("BLPOP", *bells, f"{timeout_s:.3f}", check_health=False)
        self._waiting_on = connection._sock

    def read(self, connection: Any) -> bool:
        """Ends a wait whose reply has arrived; whether a bell rang."""
        self._waiting_on = None
        try:
            rung = connection.read_response()
        except ResponseError:
            raise
        except Exception:
            # The next turn of the loop opens it and registers it again.
            connection.disconnect()
            raise
        if rung is not None:
            self.has_rung = True
        return rung is not None

    def leave(self, connection: Any, client: Redis) -> bool:
        """Ends a wait, by a command on another connection; whether a bell rang meanwhile."""
        if self._unblock(connection, client):
            return self.read(connection)
        # A ring may just have reached it.
        self._waiting_on = None
        connection.disconnect()
        self.has_rung = True
        return True

    def _unblock(self, connection: Any, client: Redis) -> bool:
        """False if nothing answers, or the user may not do it, or not know which client waits."""
        try:
            # The command that waits may come after the one that ends it, on another connection.
            for _ in range(UNBLOCK_TIMES if self._client_id else 0):
                unblocked = client.client_unblock(self._client_id)
                if unblocked or connection.can_read(timeout=UNBLOCK_S):
                    return True
        except ResponseError:
            pass
        return False


def _client_id(connection: Any) -> int:
    """0 if the user is not allowed to ask."""
    connection.send_command("CLIENT", "ID", check_health=False)
    try:
        while not isinstance(reply := connection.read_response(), int):
            # To a BRPOP of kombu's: mingle waited for replies on this channel.
            pass
    except ResponseError:
        return 0
    return reply
