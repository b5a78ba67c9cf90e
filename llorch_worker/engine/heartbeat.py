"""Whether the engine's thread still gets on."""

from __future__ import annotations

import time


class Heartbeat:
    """The thread's last sign of life. One thread beats and rests; any thread reads, without a lock.

    A step that hangs gives no sign of life, and neither does a thread that died in one.
    """

    __slots__ = ("_last_s",)

    def __init__(self) -> None:
        # Monotonic time in s; None while idle. One attribute, so that a reader never sees half.
        self._last_s: float | None = None

    def beat(self) -> None:
        """There is work, and some of it was just done or is about to be."""
        self._last_s = time.monotonic()

    def rest(self) -> None:
        """There is nothing to do."""
        self._last_s = None

    def stalled_for_s(self) -> float:
        """Seconds since the last beat; 0.0 while idle."""
        last_s = self._last_s
        return 0.0 if last_s is None else time.monotonic() - last_s
