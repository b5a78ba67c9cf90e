"""An event loop's selector that lets tokens gather, so that many cost one iteration of the loop."""

from __future__ import annotations

import selectors
import threading
import time
from typing import Final

LEAST_GATHER_S: Final = 0.005
"""A server tells the tokens of all its sequences within a few ms of each other."""
MOST_GATHER_S: Final = 0.06
HURRY_S: Final = 0.05
"""How long it takes at most until the server has a request."""

_Ready = list[tuple[selectors.SelectorKey, int]]


class GatheringSelector(selectors.DefaultSelector):
    """While answers stream, what is ready waits a moment for company: longer if none is urgent.

    If each token had an iteration of its own, the worker would interrupt the server's threads so
    often, all of which wait in each step for the one that was interrupted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._urgent_at_s: dict[object, float] = {}
        self._hurries_until_s = 0.0
        self._is_called = threading.Event()

    def select(self, timeout: float | None = None) -> _Ready:
        ready = super().select(timeout)
        waits = timeout is None or timeout > 0  # nothing else is to be done
        self._is_called.clear()  # before it is read until when to hurry: who calls then is heard
        now_s = time.monotonic()
        if ready and waits and self._urgent_at_s and now_s > self._hurries_until_s:
            left_s = min(self._urgent_at_s.values()) - now_s
            self._is_called.wait(min(max(left_s, LEAST_GATHER_S), MOST_GATHER_S))
            ready = super().select(0)
        return ready

    def hurry(self) -> None:
        """A request begins or is cancelled. Any thread may call it."""
        self._hurries_until_s = time.monotonic() + HURRY_S
        self._is_called.set()

    def stream(self, answer: object, urgent_at_s: float) -> None:
        """``answer`` has begun. ``urgent_at_s``: monotonic, when it may end, or be read."""
        self._urgent_at_s[answer] = urgent_at_s

    def end(self, answer: object) -> None:
        self._urgent_at_s.pop(answer, None)
