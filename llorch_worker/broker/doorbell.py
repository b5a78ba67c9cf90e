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

from celery.utils import uuid
from redis import Redis
from redis.exceptions import ResponseError

from llorch_worker.broker import keys
from llorch_worker.broker.scripts import run_script, text

ANSWER_S = 1.0
"""How long the end of a wait may take, before its connection is taken for dead."""
KEPT_S = 60
"""How long a ring that ends a wait stays, if its worker dies."""


class Doorbell:
    """A worker's wait on a connection that does nothing else."""

    def __init__(self) -> None:
        self._own = keys.bell(uuid())
        """Its ring ends the wait."""
        self._waiting_on: Any = None

    def waits(self, connection: Any) -> bool:
        return self._waiting_on is not None and self._waiting_on is connection._sock

    def wait(self, connection: Any, bells: Sequence[str], timeout_s: float) -> None:
        """Begins to wait; the connection becomes readable at a ring, or after ``timeout_s``."""
        # No health check: its PING would take the reply.
        connection.send_command("BLPOP", *bells, self._own, f"{timeout_s:.3f}", check_health=False)
        self._waiting_on = connection._sock

    def read(self, connection: Any) -> bool:
        """Ends a wait whose reply has arrived; whether a bell rang."""
        self._waiting_on = None
        try:
            reply = connection.read_response()
        except ResponseError:
            raise
        except Exception:
            # The next turn of the loop opens it and registers it again.
            connection.disconnect()
            raise
        return reply is not None and text(reply[0]) != self._own

    def leave(self, connection: Any, client: Redis) -> bool:
        """Ends a wait, by a command on another connection; whether a bell rang meanwhile."""
        try:
            run_script(client, "end_wait", [KEPT_S], [self._own])
            ended = connection.can_read(timeout=ANSWER_S)
            # It is still there if a bell rang just before.
            client.delete(self._own)
        except ResponseError:
            ended = False  # Redis takes no writes now
        if ended:
            return self.read(connection)
        # A ring may just have reached it.
        self._waiting_on = None
        connection.disconnect()
        return True
