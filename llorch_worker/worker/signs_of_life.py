"""What probes and service managers learn of a worker: loading, ready, advancing, stopping."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from celery.utils.log import get_logger

from llorch_worker.broker.connections.repeater import Repeater

logger = get_logger(__name__)

BEAT_S = 5.0
"""How often a worker shows that it lives. A watchdog gets two signs or more in its time."""
_SOCKET = "NOTIFY_SOCKET"
_WATCHDOG_US = "WATCHDOG_USEC"
_WATCHDOG_PID = "WATCHDOG_PID"


class SignsOfLife(Repeater):
    """A thread that renews a file and notifies systemd, from :meth:`begin` to :meth:`close`.

    Reading a file's age costs a probe nothing, and a worker that cannot run Python code cannot
    renew it. Its engine has a watchdog of its own: see :class:`.ResidentEngine`.
    """

    def __init__(self, file: Path | None) -> None:
        """Removes the file that an earlier worker left.

        Raises:
            OSError: this process may not write the file.
        """
        self._file = file
        self._manager = ServiceManager()
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


class ServiceManager:
    """The service manager that started this process; without one nothing happens.

    The protocol of sd_notify(3) is one datagram of ``NAME=value`` lines, so it needs no library.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get(_SOCKET, "")
        # "@" stands for the zero byte with which abstract names begin.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.present = bool(address)
        self.watchdog_s = _watchdog_s(environment) if address else None
        """It ends this process if ``WATCHDOG=1`` stays away so long; None: it does not watch."""

    def notify(self, *assignments: str) -> None:
        """Sends ``READY=1``, ``STATUS=...`` and the like. Never blocks and never raises: the jobs
        go on without a service manager."""
        if not self.present:
            return
        message = "\n".join(assignments).encode()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(message, socket.MSG_DONTWAIT, self._address)


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    period, pid = environment.get(_WATCHDOG_US, ""), environment.get(_WATCHDOG_PID)
    if not period.isdecimal() or pid not in (None, str(os.getpid())):
        return None
    return int(period) / 1e6
