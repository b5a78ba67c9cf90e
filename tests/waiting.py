"""Waits for a condition."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

WAIT_TIMEOUT_S = 120.0
"""Far more than a busy machine needs: only what never comes takes so long."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.05
"""Between two looks: what does not come at once is not looked for 100 times a second, which takes
the time from what is waited for."""

T = TypeVar("T")


def wait_until(look: Callable[[], T], *, timeout_s: float = WAIT_TIMEOUT_S, what: str = "") -> T:
    """Returns the first true value of ``look``; fails the test after ``timeout_s``."""
    give_up_s = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > give_up_s:
            raise AssertionError(f"waited {timeout_s} s for {what or look}; last saw {found!r}")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, LONGEST_PAUSE_S)


def wait_until_freed(make: Callable[[], object]) -> None:
    """Waits until what ``make`` returned is gone. Python collects no cycles meanwhile, as a quiet
    process does not for hours."""
    gc.disable()
    try:
        left = weakref.ref(make())
        wait_until(lambda: left() is None)
    finally:
        gc.enable()
