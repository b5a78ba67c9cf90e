"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a text at the smallest position at which any stop string starts. Of several that start
    there it finds the shortest.

    How the text is split over pushes does not matter: text that may begin a stop string is held
    back until that is known.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include``: cut the text behind the stop string instead."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that ends the text."""

    @property
    def matched(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was found (now or before)."""
        if self.matched:
            return "", True
        if not self._stops:
            return text, False
        held = self._held + text
        match = self._first_match(held)
        beginning = self._first_beginning(held, len(held) if match is None else match)
        if match is not None and beginning is None:
            return self._end(held, match), True
        # A longer stop string that begins before a complete one may still win.
        cut = len(held) if beginning is None else beginning
        self._held = held[cut:]
        return held[:cut], False

    def flush(self) -> str:
        """The text held back at the end. Sets ``matched`` if it holds a stop string."""
        if self.matched:
            return ""
        text, self._held = self._held, ""
        match = self._first_match(text)
        return text if match is None else self._end(text, match)

    def _end(self, text: str, match: int) -> str:
        # A longer one at the same place may still be coming in pieces.
        self.found = min((each for each in self._stops if text.startswith(each, match)), key=len)
        self._held = ""
        return text[:match] + (self.found if self._include else "")

    def _first_match(self, text: str) -> int | None:
        found = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        return min(found, default=None)

    def _first_beginning(self, text: str, end: int) -> int | None:
        """The first position before ``end`` from which ``text`` runs out inside a stop string."""
        first = None
        for stop in self._stops:
            position = text.find(stop[0], max(0, len(text) - len(stop) + 1), end)
            while position >= 0:
                if stop.startswith(text[position:]):
                    end = first = position
                    break
                position = text.find(stop[0], position + 1, end)
        return first
