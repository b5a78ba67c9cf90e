"""Notifications from Redis that a model's inbox has changed."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ConnectionError as NoConnection

from llorch_worker.broker import keys, queues

TRACKING_CHANNEL = "__redis__:invalidate"
LATE_S = 0.1
"""How much later news may come than a reply on another connection that was sent after it."""


class InboxNews:
    """Key tracking (``CLIENT TRACKING``) on two connections that do nothing else.

    Redis reports a change of a list once, and then nothing until :meth:`is_filled` has looked at it
    again, so the reader decides what a busy fleet costs; likewise of what else there is to do, see
    :meth:`has_work`. News arrives within a millisecond, and costs nothing while all is idle.
    """

    def __init__(self, asking: Any, hearing: Any, model: str) -> None:
        """Asks for news; raises ResponseError if the user is not allowed to."""
        self._asking, self._hearing = asking, hearing
        self._lists = queues.inbox_of(model)
        self._lease = keys.watch(model)
        self._work = work_of(model)
        self._may_have_work = True
        self.renewals = 0
        """Renewals of the watcher's lease that it has not heard of."""
        client_id = _call(hearing, "CLIENT", "ID")
        track = ("CLIENT", "TRACKING", "ON", "REDIRECT", client_id)
        _call(hearing, *track, "BCAST", "PREFIX", self._lease)
        _call(hearing, "SUBSCRIBE", TRACKING_CHANNEL)
        _call(asking, *track)
        self.is_filled()

    def is_filled(self) -> bool:
        """Whether there are messages. From now on Redis reports the next change."""
        return bool(_call(self._asking, "EXISTS", *self._lists))

    def has_work(self) -> bool:
        """Whether one of :func:`work_of` exists. It asks Redis only after a change, or while one
        does."""
        if self._may_have_work:
            self._may_have_work = bool(_call(self._asking, "EXISTS", *self._work))
        return self._may_have_work

    def note_renewal(self) -> None:
        """Call it after each renewal of the watcher's lease, which is news too. Raises
        ConnectionError if the one before was not heard of.

        A proxy in between may drop a connection on which nothing is sent, without notice.
        """
        if self.renewals and not self._hearing.can_read(timeout=LATE_S):
            raise NoConnection("the connection for news of the inbox is dead")
        self.renewals += 1

    def read(self, timeout_s: float) -> set[str]:
        """The lists of the inbox that have changed; waits ``timeout_s`` for one."""
        changed: set[str] = set()
        # Raises ConnectionError if Redis has closed it, and tracks nothing for it any more.
        self._asking.can_read(timeout=0)
        while self._hearing.can_read(timeout=0 if changed else timeout_s):
            message = self._hearing.read_response(disable_decoding=True)
            # Without keys if the whole database was emptied: nothing is tracked any more.
            every = (*self._lists, *self._work)
            changed.update(every if message[2] is None else map(_text, message[2]))
        if self._lease in changed:
            self.renewals = 0
        self._may_have_work = self._may_have_work or not changed.isdisjoint(self._work)
        return changed.intersection(self._lists)


def work_of(model: str) -> list[str]:
    """What a watcher of the model looks after beside its inbox: they exist while there is any."""
    return [keys.waiting(model), keys.scheduled(model), keys.DEADLINES]


def _call(connection: Any, *command: Any) -> Any:
    connection.send_command(*command, check_health=False)
    return connection.read_response()


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
