"""The text of one choice as its tokens come: whole characters, cut at a stop string."""

from __future__ import annotations

from collections.abc import Iterable

from llorch_worker.text import IncrementalDetokenizer, StopStrings, Tokenizer


class ChoiceText:
    """Turns token ids into text that may be shown.

    What may be the start of a stop string, or is an incomplete character, is held back until the
    next tokens decide. The pieces that :meth:`take` returns, put together, are the result's text.
    """

    __slots__ = ("_detokenizer", "_fresh", "_parts", "_stops", "_vocab_size")

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = ()) -> None:
        stops = tuple(stops)
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._vocab_size = tokenizer.vocab_size
        self._stops = StopStrings(stops) if stops else None
        self._parts: list[str] = []
        self._fresh: list[str] = []

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Adds a token; True when its text completed a stop string.

        ``may_stop`` is False within the first ``min_tokens`` tokens: their text is not searched.
        """
        # A model's output may have more rows than its vocabulary has tokens: padding, no text.
        text = self._detokenizer.push((token_id,)) if token_id < self._vocab_size else ""
        matched = False
        if self._stops is not None and may_stop:
            text, matched = self._stops.push(text)
        if text:
            self._fresh.append(text)
        return matched

    def close(self) -> bool:
        """Releases what was held back; True when a stop string ends the text."""
        tail = self._detokenizer.flush()
        if self._stops is not None:
            tail = self._stops.push(tail)[0] + self._stops.flush()
        if tail:
            self._fresh.append(tail)
        return self._stops is not None and self._stops.matched

    def take(self) -> str:
        """The text that became final since the last call."""
        fresh = self.ready
        self._fresh.clear()
        if fresh:
            self._parts.append(fresh)
        return fresh

    @property
    def ready(self) -> str:
        """The text that became final and was not taken yet."""
        return "".join(self._fresh)

    def skip(self, shown: str) -> bool:
        """Takes ``shown``, which readers have already; False where no such text is ready."""
        ready = self.ready
        if not ready.startswith(shown):
            return False
        self._parts.append(shown)
        self._fresh[:] = [ready[len(shown) :]]
        return True

    @property
    def released(self) -> str:
        """All text taken so far."""
        return "".join(self._parts)
