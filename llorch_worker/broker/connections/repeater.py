"""A thread that does one thing again and again, also through outages of Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable

from celery.utils.log import get_logger
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from llorch_worker.broker.connections.outage import RedisOutage
from llorch_worker.contract.errors import defect_of
from llorch_worker.contract.frames import forget_frames

logger = get_logger(__name__)

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0
CLOSE_TIMEOUT_S = 5.0


class Repeater:
    """A daemon thread that waits ``every_s`` and calls ``act``, again and again until it is closed.

    If Redis fails, it tries again sooner, and then less and less often up to once a second.
    It logs that once, and once that Redis serves again. After a defect it goes on likewise.
    """

    def __init__(
        self, name: str, what: str, act: Callable[[], object], every_s: float = 0.0
    ) -> None:
        """``what`` it does, for the log: see :class:`RedisOutage`.

        An ``act`` that takes long returns soon after :attr:`closing` is set, and calls
        :meth:`served` when Redis has answered.
        """
        self.closing = threading.Event()
        self._what = what
        self._act = act
        self._every_s = every_s
        self._retry_s = 0.0
        self._outage = RedisOutage(what)
        self._thread = threading.Thread(target=self._run, name=f"llorch-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Waits for what the thread is doing. A call that hangs ends with the process."""
        self.closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def attempt(self) -> None:
        """Calls ``act`` once."""
        try:
            self._act()
        except Exception as error:
            self._retry_s = min(max(2 * self._retry_s, FIRST_RETRY_S), LONGEST_RETRY_S)
            if isinstance(error, RedisError | OperationalError):
                self._outage.failed(error)
            else:
                defect = defect_of(error, "worker")
                logger.error("cannot %s, will retry", self._what, exc_info=defect)
            forget_frames(error)
        else:
            self.served()

    def served(self) -> None:
        """Ends an outage."""
        self._retry_s = 0.0
        self._outage.over()

    def _run(self) -> None:
        while not self.closing.wait(self._retry_s or self._every_s):
            self.attempt()
