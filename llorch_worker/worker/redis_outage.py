"""What one part of the worker cannot do while Redis is away."""

from __future__ import annotations

from celery.utils.log import get_logger

logger = get_logger(__name__)


class RedisOutage:
    """Says once that it began and once that it is over, however often is tried in between.

    Each part has its own: Redis may refuse one what it does for another.
    """

    def __init__(self, lost: str, regained: str) -> None:
        """``lost`` and ``regained``: the two sentences, as far as they do not depend on Redis."""
        self._lost = lost
        self._regained = regained
        self.lasts = False

    def met(self, error: Exception) -> None:
        """Redis failed us, with ``error``."""
        if not self.lasts:
            logger.warning("%s, will retry: %s", self._lost, error)
        self.lasts = True

    def over(self) -> None:
        """Redis did what it was asked."""
        if self.lasts:
            logger.info(self._regained)
        self.lasts = False
