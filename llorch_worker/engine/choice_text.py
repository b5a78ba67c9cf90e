"""The text of one choice as its tokens arrive: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable

from llorch_worker.text import IncrementalDetokenizer, StopStrings, Tokenizer


class ChoiceText:
    """Turns token ids into text that may be shown.

    It holds back incomplete characters and text that may begin a stop string until later tokens
    decide. The pieces that :meth:`take` returns add up to the text of the result.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str] = ()) -> None:
        stops = tuple(stops)
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._vocab_size = tokenizer.vocab_size
        self._stops = StopStrings(stops) if stops else None
        self._parts: list[str] = []
        self._fresh: list[str] = []

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Adds a token; True if its text completed a stop string.

        ``may_stop`` is False within the first ``min_tokens`` tokens: their text is not searched.
        """
        # A model may have more logits than its vocabulary has tokens; the padding has no text.
        text = self._detokenizer.push((token_id,)) if token_id < self._vocab_size else ""
        matched = False
        if self._stops is not None and may_stop:
            text, matched = self._stops.push(text)
        if text:
            self._fresh.append(text)
        return matched

    def close(self) -> bool:
        """Releases the text held back; True if a stop string ends the text."""
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
        """The text that is final but not yet taken."""
        return "".join(self._fresh)

    def skip(self, shown: str) -> bool:
        """Takes ``shown``, which readers already have; False if the ready text differs."""
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
