"""Comments in thousands of streams, by one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

COMMENT_S = 15.0
"""How often a comment in a stream says that its connection is alive."""
TICKS = 60
"""So many times in that time the timer fires for a part of the streams."""

Comment = Callable[[], None]


class Comments:
    """Calls what writes a comment, each every ``COMMENT_S``, until it is removed."""

    def __init__(self) -> None:
        self._parts: list[dict[Comment, None]] = [{} for _ in range(TICKS)]
        self._now = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, comment: Comment) -> None:
        self._parts[self._now][comment] = None
        if self._timer is None:
            self._wait()

    def remove(self, comment: Comment) -> None:
        for part in self._parts:
            part.pop(comment, None)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(COMMENT_S / TICKS, self._fire)

    def _fire(self) -> None:
        self._now = (self._now + 1) % TICKS
        self._timer = None
        for comment in list(self._parts[self._now]):
            comment()
        if any(self._parts):
            self._wait()
