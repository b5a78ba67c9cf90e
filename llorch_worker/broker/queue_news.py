"""Notifications from Redis that a model's lists or their bells have changed."""

from __future__ import annotations

from typing import Any

from llorch_worker.broker import keys
from llorch_worker.broker.queues import normal_queue

TRACKING_CHANNEL = "__redis__:invalidate"


class QueueNews:
    """Key tracking (``CLIENT TRACKING ... BCAST``) on a connection that waits for nothing else.

    News arrives within a millisecond, covers every priority and every worker queue, and costs
    nothing while the queues are idle. It names what changed, but not how: a pop is news too.
    """

    def __init__(self, connection: Any, model: str) -> None:
        """Asks for news; raises ResponseError if the user is not allowed to."""
        self._connection = connection
        client_id = self._call("CLIENT", "ID")
        queue = normal_queue(model)
        # Two prefixes cover all lists and bells of a model, and those of models with longer names.
        prefixes = ("PREFIX", queue, "PREFIX", keys.bell(queue))
        self._call("CLIENT", "TRACKING", "ON", "REDIRECT", client_id, "BCAST", *prefixes)
        self._call("SUBSCRIBE", TRACKING_CHANNEL)

    def read(self, timeout_s: float) -> set[str]:
        """The keys that have changed; waits ``timeout_s`` for the first."""
        changed: set[str] = set()
        while self._connection.can_read(timeout=0 if changed else timeout_s):
            message = self._connection.read_response(disable_decoding=True)
            # Without keys if the whole database was emptied.
            for name in message[2] or ():
                changed.add(name.decode(errors="replace"))
        return changed

    def _call(self, *command: Any) -> Any:
        self._connection.send_command(*command, check_health=False)
        return self._connection.read_response()
