"""How the receivers of webhooks answer, as this gateway sees it."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

MOST_AT_ONCE = 8
"""Attempts at one receiver."""
LONGEST_PAUSE_S = 60.0
MOST_SILENT = 10_000


class Receivers:
    """Hosts that do not answer are tried ever more seldom, one attempt at a time."""

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self._silent: dict[str, tuple[float, float]] = {}
        """Of those that did not answer last: the pause, and when it ends."""

    def has_room(self, receiver: str, attempts: int) -> bool:
        """Whether one more attempt may be made beside ``attempts``."""
        if receiver not in self._silent:
            return attempts < MOST_AT_ONCE
        return attempts == 0 and time.monotonic() >= self._silent[receiver][1]

    def note(self, receiver: str, *, answered: bool) -> None:
        pause_s, _ = self._silent.pop(receiver, (0.0, 0.0))
        if answered:
            return
        pause_s = min(2 * pause_s or self._first_pause_s, LONGEST_PAUSE_S)
        self._silent[receiver] = pause_s, time.monotonic() + pause_s
        if len(self._silent) > MOST_SILENT:
            del self._silent[next(iter(self._silent))]


def receiver_of(url: str) -> str:
    """Host and port."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()
