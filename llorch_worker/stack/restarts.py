"""When programs that ended are started again."""

from __future__ import annotations

import time

from llorch_worker.stack.children import Child

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 60.0
"""A child that has run this long is restarted with the first backoff."""


class Restarts:
    """The programs to start again, each after a backoff."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._due_s: dict[str, float] = {}

    def plan(self, ended: Child) -> float:
        """Plan a child's restart; returns the seconds until then."""
        now_s = time.monotonic()
        lived_s = now_s - ended.started_at_s
        count = 0 if lived_s > HEALTHY_AFTER_S else self._counts.get(ended.name, 0)
        self._counts[ended.name] = count + 1
        delay_s = backoff_s(count)
        self._due_s[ended.name] = now_s + delay_s
        return delay_s

    def take_due(self) -> list[str]:
        """The names of the programs to start now."""
        now_s = time.monotonic()
        due = [name for name, due_s in self._due_s.items() if due_s <= now_s]
        for name in due:
            del self._due_s[name]
        return due


def backoff_s(restarts: int) -> float:
    """Seconds to wait before restart number ``restarts`` (from 0) of a short-lived child."""
    return min(FIRST_BACKOFF_S * 2.0**restarts, LONGEST_BACKOFF_S)
