"""Log lines about outages of Redis."""

from __future__ import annotations

import threading
from typing import ClassVar
from weakref import WeakSet

from celery.utils.log import get_logger
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import TimeoutError as NoReply

logger = get_logger(__name__)

_REFUSALS = {
    "READONLY": "READONLY",
    "read only replica": "READONLY",
    "UNBLOCKED": "READONLY",
    "NOREPLICAS": "NOREPLICAS",
    "MISCONF": "MISCONF",
    "max number of clients": "maxclients",
    "used memory > 'maxmemory'": "maxmemory",
}
"""Texts in the errors with which Redis refuses everybody -> the reason. Within a script or a
pipeline they stand somewhere in the error."""
_AWAY = "away"


class RedisOutage:
    """One part of a process that needs Redis, and whether it fails.

    When Redis is away, or refuses everybody, many parts fail. The process logs that once, and once
    that the last of them is served again. Any other error is logged by each part that meets it.
    """

    _failing: ClassVar[dict[str, WeakSet[RedisOutage]]] = {}
    """Reason -> the parts that met it."""
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, what: str) -> None:
        """``what`` the part does: "renew leases"."""
        self._what = what
        self._reason: str | None = None

    def failed(self, error: Exception) -> None:
        """Notes that Redis failed with ``error``."""
        reason = _shared_reason(error)
        own = f"cannot {self._what}: {error}"
        if (reason or own) == self._reason:
            return
        first = self._move(reason or own)
        if reason is None:
            logger.warning("cannot %s, will retry: %s", self._what, error)
        elif first:
            state = "is away" if reason == _AWAY else "refuses"
            logger.warning("Redis %s, will retry: %s", state, error)

    def over(self) -> None:
        """Notes that Redis answered."""
        reason = self._reason
        if reason is None:
            return
        last = self._move(None)
        if reason.startswith("cannot"):
            logger.info("can %s again", self._what)
        elif last:
            logger.info("Redis serves again")

    def _move(self, reason: str | None) -> bool:
        """Whether no other part fails for ``reason`` or, if it is None, for the former one."""
        with self._lock:
            former, self._reason = self._reason, reason
            if former is not None:
                self._failing[former].discard(self)
            parts = self._failing.setdefault(reason or former or "", WeakSet())
            alone = not parts
            if reason is not None:
                parts.add(self)
        return alone


def _shared_reason(error: Exception) -> str | None:
    text = str(error)
    refusal = next((reason for code, reason in _REFUSALS.items() if code in text), None)
    if refusal is None and isinstance(error, NoConnection | NoReply | OSError):
        return _AWAY
    return refusal
