"""Whether a process does nothing for too long, seen from the one that waits for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

LOOK_S: Final = 1.0
"""Pauses between two looks at a process that somebody waits for."""
_SUSPENDED_S: Final = 10 * LOOK_S
"""If nobody looked for so long, who looks was suspended, and perhaps the process as well."""
_WORKS: Final = 0.01
"""A process that works takes this part of a processor at least. Threads that only wake up now and
then, such as a driver's, take less."""
_UNSEEN: Final = 0.1
"""For this part of the limit nobody asks what it does: that looks at all processes there are."""
_READS_BYTES_PER_S: Final = 10e6
"""What is read counts as so much work: a slow disk takes little of a processor."""
_PROC: Final = Path("/proc")
# Of /proc/PID/stat, after the name.
_STATE, _SESSION, _FAULTS, _TICKS = 0, 3, 9, slice(11, 15)
_WAITS_FOR_THE_MACHINE: Final = "RD"
"""States of one that waits for a processor or a disk."""


class Standstill:
    """Tells when a process is given up: it has done nothing for ``idle_s``, or has told nothing for
    ``silent_s``, whatever it does. Any thread may call it.

    What it does is what all processes of its session compute and read, so that a compiler's work
    counts too. Where the system does not say, only its silence counts.
    """

    def __init__(self, pid: int, *, idle_s: float, silent_s: float) -> None:
        """``pid``: of a process with a session of its own."""
        self._session = pid
        self._idle_s = idle_s
        self._silent_s = silent_s
        self._looked_s = time.monotonic()
        self.heard()

    def heard(self) -> None:
        """The process has told something, or begins to have work."""
        self._heard_s = self._worked_s = time.monotonic()
        self._work_s: float | None = None

    def reason(self) -> str | None:
        """Why the process is given up now, in a few words."""
        now_s = time.monotonic()
        looked_s, self._looked_s = self._looked_s, now_s
        if now_s - looked_s >= _SUSPENDED_S:
            self.heard()
        if (silent_s := now_s - self._heard_s) >= self._silent_s:
            return f"it told nothing for {silent_s:.0f} s"
        if now_s - self._worked_s < _UNSEEN * self._idle_s:
            return None
        idle_s, before_s = now_s - self._worked_s, self._work_s
        found = [*_found(self._session)]
        work_s = sum(work_s for _, work_s in found)
        # It is less than before where a process of them has ended.
        works = before_s is None or abs(work_s - before_s) >= _WORKS * idle_s
        if works or not found or any(state in _WAITS_FOR_THE_MACHINE for state, _ in found):
            self._worked_s, self._work_s = now_s, work_s
        elif idle_s >= self._idle_s:
            return f"it did nothing for {idle_s:.0f} s"
        return None


def _found(session: int) -> Iterator[tuple[str, float]]:
    """Of each process of a session its state, and its work so far in seconds of a processor."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            # A name of 15 bytes may end amid a character.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[_SESSION]) == session:
                read = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
                # A major fault is a read of a mapped file that waited.
                ticks = sum(map(int, fields[_TICKS])) + int(fields[_FAULTS])
                yield fields[_STATE], ticks * tick_s + int(read["rchar"]) / _READS_BYTES_PER_S
