"""When a program that ended is started again."""

from __future__ import annotations

from typing import Final

PAUSES_S: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
"""Before the starts after ends in a row; the last one from then on."""
LIVED_S: Final = 60.0
"""One that ran for so long ends as the first of a row."""


class Restarts:
    """The pauses of one program: none after its first end, and longer ones after those that follow
    soon. Any thread may call it."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def pause_s(self, lived_s: float) -> float:
        """How long to wait, now that it has ended after ``lived_s``."""
        count = 1 if lived_s >= LIVED_S else self._in_a_row + 1
        self._in_a_row = count
        return PAUSES_S[min(count, len(PAUSES_S)) - 1]

    def end_row(self) -> None:
        """Its next end is the first of a row: it did what it is for, or another one takes its
        place."""
        self._in_a_row = 0


def in_words(pause_s: float) -> str:
    """When it starts, as the end of a sentence."""
    return f"in {round(pause_s)} s" if round(pause_s) > 0 else "now"
