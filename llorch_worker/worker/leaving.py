"""How the jobs of an engine that is to end leave it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Final

POLL_S: Final = 0.05
LEAVE_S: Final = 30.0
"""How long jobs that are handed back may take to leave. They write their last tokens."""


def let_leave(
    jobs: Callable[[], Collection[str]],
    patience_s: float,
    *,
    hand_back: Callable[[Collection[str]], None],
    closing: threading.Event,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Waits until there are no ``jobs``; False if they do not leave. They may end for
    ``patience_s``. Then ``hand_back`` gets their ids, and they leave at the boundary of a step.
    ``meanwhile`` is called every few ms. Once ``closing`` is set they end by themselves, and nobody
    waits here."""

    def have_left(limit_s: float) -> bool:
        until_s = time.monotonic() + limit_s
        while jobs():
            if time.monotonic() >= until_s or closing.wait(POLL_S):
                return False
            meanwhile()
        return True

    if have_left(patience_s):
        return True
    if not closing.is_set():
        hand_back(jobs())
    return have_left(LEAVE_S)
