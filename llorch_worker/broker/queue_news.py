"""Notifications from Redis that a model's lists or their bells have changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redis.exceptions import ConnectionError as NoConnection

from llorch_worker.broker import keys, queues

TRACKING_CHANNEL = "__redis__:invalidate"
LATE_S = 0.1
"""How much later news may come than a reply on another connection that was sent after it."""


class QueueNews:
    """Key tracking (``CLIENT TRACKING``) on two connections that do nothing else.

    Redis reports a change of a list for all workers once, and then nothing until
    :meth:`any_exist` has looked at it again, so the reader decides what a busy fleet costs. Of the
    worker queues, which are many and seldom used, it reports each change (``BCAST``). News arrives
    within a millisecond, and costs nothing while the queues are idle. It names what changed, but
    not how: a pop is news too.
    """

    def __init__(self, asking: Any, hearing: Any, model: str) -> None:
        """Asks for news; raises ResponseError if the user is not allowed to."""
        self._asking, self._hearing = asking, hearing
        self._lists = queues.watched(model)
        self._bells = list(map(keys.bell, queues.queues(model)))
        self._lease = keys.watch(model)
        self.renewals = 0
        """Renewals of the watcher's lease that it has not heard of."""
        client_id = _call(hearing, "CLIENT", "ID")
        of_workers = f"{queues.normal_queue(model)}{queues.WORKER_MARK}"
        track = ("CLIENT", "TRACKING", "ON", "REDIRECT", client_id)
        _call(hearing, *track, "BCAST", "PREFIX", of_workers, "PREFIX", self._lease)
        _call(hearing, "SUBSCRIBE", TRACKING_CHANNEL)
        _call(asking, *track)
        self.any_exist(self._lists)

    def any_exist(self, lists: Iterable[str]) -> bool:
        """Whether there are jobs in the ``lists``, or rings of the model's bells. From now on Redis
        reports the next change of each."""
        return bool(_call(self._asking, "EXISTS", *lists, *self._bells))

    def note_renewal(self) -> None:
        """Call it after each renewal of the watcher's lease, which is news too. Raises
        ConnectionError if the one before was not heard of.

        A proxy in between may drop a connection on which nothing is sent, without notice.
        """
        if self.renewals and not self._hearing.can_read(timeout=LATE_S):
            raise NoConnection("the connection for news of the queues is dead")
        self.renewals += 1

    def read(self, timeout_s: float) -> set[str]:
        """The keys that have changed; waits ``timeout_s`` for the first."""
        changed: set[str] = set()
        # Raises ConnectionError if Redis has closed it, and tracks nothing for it any more.
        self._asking.can_read(timeout=0)
        while self._hearing.can_read(timeout=0 if changed else timeout_s):
            message = self._hearing.read_response(disable_decoding=True)
            # Without keys if the whole database was emptied: nothing is tracked any more.
            changed |= set(self._lists if message[2] is None else _text(message[2]))
        if self._lease in changed:
            self.renewals = 0
        return changed - {self._lease}


def _call(connection: Any, *command: Any) -> Any:
    connection.send_command(*command, check_health=False)
    return connection.read_response()


def _text(names: Iterable[bytes]) -> list[str]:
    return [name.decode(errors="replace") for name in names]
