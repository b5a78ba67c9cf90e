"""Log lines about outages of Redis."""

from __future__ import annotations

from celery.utils.log import get_logger

logger = get_logger(__name__)


class RedisOutage:
    """Logs once that an outage began and once that it ended, however many attempts failed.

    Each part of a process has its own, because Redis may refuse one command and accept another.
    """

    def __init__(self, lost: str, regained: str) -> None:
        """``lost`` and ``regained``: the texts to log at the beginning and at the end."""
        self._lost = lost
        self._regained = regained
        self._lasts = False

    def failed(self, error: Exception) -> None:
        """Notes that Redis failed with ``error``."""
        if not self._lasts:
            logger.warning("%s, will retry: %s", self._lost, error)
        self._lasts = True

    def over(self) -> None:
        """Notes that Redis answered."""
        if self._lasts:
            logger.info(self._regained)
        self._lasts = False
