"""Waits for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_TIMEOUT_S = 60.0

T = TypeVar("T")


def wait_until(look: Callable[[], T], *, timeout_s: float = WAIT_TIMEOUT_S, what: str = "") -> T:
    """Returns the first true value of ``look``; fails the test after ``timeout_s``."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > give_up_s:
            raise AssertionError(f"waited {timeout_s} s for {what or look}; last saw {found!r}")
        time.sleep(0.01)
