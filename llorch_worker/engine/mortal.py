"""What all engines that may die have in common. Imports no torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from llorch_worker.contract import InternalError
from llorch_worker.engine.interface import Death, EngineDied

logger = logging.getLogger(__name__)


class Mortal:
    """Open, until it is closed or dies. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held for each change of whether it is open."""
        self._closing = False
        self._death: Death | None = None
        self._mourners: list[Callable[[Death], None]] = []

    @property
    def healthy(self) -> bool:
        """See :attr:`.EngineInterface.healthy`."""
        return self._death is None and not self._closing

    def on_death(self, callback: Callable[[Death], None]) -> None:
        """``callback`` is called once when it has died without being asked to, before its
        generations fail; at once if it is dead."""
        with self._lock:
            if self._death is None:
                if not self._closing:
                    self._mourners.append(callback)
                return
        callback(self._death)

    def _require_open(self) -> None:
        """Raises ``EngineDied``, or ``InternalError`` if it is closed."""
        if self._death is not None:
            raise EngineDied(self._death)
        if self._closing:
            raise InternalError("the engine is closed")

    def _begin_close(self) -> bool:
        """Whether this is the first call, for one that lives."""
        with self._lock:
            was_healthy, self._closing = self.healthy, True
            # They are not told any more, and may hold this in turn.
            self._mourners.clear()
        return was_healthy

    def _note_death(self, death: Death) -> bool:
        """Tells those that wait for it. False, without a word, if it is dead or was closed."""
        with self._lock:
            if not self.healthy:
                return False
            self._death = death
            mourners, self._mourners = self._mourners, []
        for callback in mourners:
            try:
                callback(death)
            except Exception:
                logger.exception("a callback of the engine's death failed")
        return True
