"""What probes and service managers learn of a worker: loading, ready, advancing, stopping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from celery.utils.log import get_logger

from llorch_worker.broker.repeater import Repeater
from llorch_worker.worker.service_manager import ServiceManager

logger = get_logger(__name__)

BEAT_S = 5.0
"""How often a worker shows that it lives. A watchdog gets two signs or more in its time."""


class SignsOfLife(Repeater):
    """A thread that renews a file and notifies systemd, from :meth:`begin` to :meth:`close`.

    Reading a file's age costs a probe nothing, and a worker that cannot run Python code cannot
    renew it. Its engine has a watchdog of its own: see :class:`.ResidentEngine`.
    """

    def __init__(self, file: Path | None, manager: ServiceManager | None = None) -> None:
        """Removes the file that an earlier worker left.

        Raises:
            OSError: this process may not write the file.
        """
        self._file = file
        self._manager = manager or ServiceManager()
        if file is not None:
            file.touch()
            file.unlink()
        period_s = min(BEAT_S, (self._manager.watchdog_s or 2 * BEAT_S) / 2)
        super().__init__("signs-of-life", "show signs of life", self._beat, period_s)
        self._status: Callable[[], str] = str
        self._cannot_write = False

    def loading(self, status: str) -> None:
        self._manager.notify(f"STATUS={status}")

    def begin(self, status: Callable[[], str]) -> None:
        """The worker takes jobs. Later calls, after a reconnect, do nothing.

        ``status`` makes one line for ``systemctl status``.
        """
        unwatched = self._file is None and not self._manager.present
        if unwatched or self._thread.is_alive() or self.closing.is_set():
            return
        self._status = status
        self._manager.notify("READY=1")
        self._beat()
        self.start()

    def stopping(self) -> None:
        """The worker drains. It goes on showing that it lives."""
        self._manager.notify("STOPPING=1", "STATUS=finishing its jobs")

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        self._manager.notify("WATCHDOG=1", f"STATUS={self._status()}")
        try:
            if self._file is not None:
                self._file.touch()
        except OSError as error:
            if not self._cannot_write:
                logger.warning("cannot renew %s: %s", self._file, error.strerror)
            self._cannot_write = True
