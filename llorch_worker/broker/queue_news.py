"""Notifications from Redis that one of a model's lists has changed."""

from __future__ import annotations

from typing import Any

from llorch_worker.broker.queues import normal_queue

TRACKING_CHANNEL = "__redis__:invalidate"


class QueueNews:
    """Key tracking (``CLIENT TRACKING ... BCAST``) on a connection that waits for nothing else.

    News arrives within a millisecond, covers every priority, and costs nothing while the queue is
    idle. It says only that something changed, so each one leads to a claim.
    """

    def __init__(self) -> None:
        self._socket: Any = None

    def listen(self, connection: Any, model: str) -> None:
        """Asks for news, once for each socket that ``connection`` opens."""
        if self._socket is connection._sock:
            return
        client_id = _call(connection, "CLIENT", "ID")
        while not isinstance(client_id, int):
            # The reply to a BRPOP of kombu's: mingle waited for replies on this channel.
            client_id = connection.read_response()
        # One prefix covers all lists of a model; Redis refuses overlapping ones.
        redirect = ("REDIRECT", client_id, "BCAST", "PREFIX", normal_queue(model))
        _call(connection, "CLIENT", "TRACKING", "ON", *redirect)
        _call(connection, "SUBSCRIBE", TRACKING_CHANNEL)
        self._socket = connection._sock

    @staticmethod
    def read(connection: Any) -> None:
        """Reads everything that has arrived."""
        try:
            while connection.can_read(timeout=0):
                connection.read_response()
        except Exception:
            # The next turn of the loop opens it and registers it again.
            connection.disconnect()
            raise


def _call(connection: Any, *command: Any) -> Any:
    # No health check first: its PING would take the reply to a pending BRPOP.
    connection.send_command(*command, check_health=False)
    return connection.read_response()
