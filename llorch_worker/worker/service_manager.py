"""Reports to systemd how this process is, by the protocol of sd_notify(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

_SOCKET = "NOTIFY_SOCKET"
_WATCHDOG_US = "WATCHDOG_USEC"
_WATCHDOG_PID = "WATCHDOG_PID"


class ServiceManager:
    """The service manager that started this process; without one nothing happens.

    The protocol is one datagram of ``NAME=value`` lines, so it needs no library.
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
