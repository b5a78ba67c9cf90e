"""The text of one choice as its tokens arrive: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from llorch_worker.contract import CallPart, ToolCall
from llorch_worker.text import IncrementalDetokenizer, StopStrings, ThoughtSplitter, Tokenizer
from llorch_worker.text.calls import CallReader


class ChoiceText:
    """Turns token ids into text that may be shown, apart from the thought before it and the calls
    after it.

    It holds back incomplete characters and text that may begin a stop string until later tokens
    decide. The pieces that :meth:`take` returns add up to the text of the result.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str] = (),
        thoughts: ThoughtSplitter | None = None,
        calls: CallReader | None = None,
        marks: Mapping[int, str] | None = None,
        *,
        include_stop: bool = False,
    ) -> None:
        """``marks``: control tokens that are shown, and their spelling. ``include_stop``: a stop
        string that ends the text is shown too."""
        stops = tuple(stops)
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._vocab_size = tokenizer.vocab_size
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._thoughts = thoughts
        self._calls = calls
        self._marks = marks or {}
        self._parts: list[str] = []
        self._fresh: list[str] = []
        self._thought_parts: list[str] = []
        self._fresh_thought = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Adds a token; True if its text completed a stop string.

        ``may_stop`` is False within the first ``min_tokens`` tokens: their text is not searched.
        """
        # A model may have more logits than its vocabulary has tokens; the padding has no text.
        text = self._detokenizer.push((token_id,)) if token_id < self._vocab_size else ""
        text += self._marks.get(token_id, "")
        matched = False
        if self._stops is not None and may_stop:
            text, matched = self._stops.push(text)
        if text:
            self._add(*self._split(text))
        return matched

    def _split(self, text: str) -> tuple[str, str]:
        return ("", text) if self._thoughts is None else self._thoughts.push(text)

    def _add(self, thought: str, text: str) -> None:
        self._fresh_thought += thought
        if text and self._calls is not None:
            text = self._calls.push(text)
        if text:
            self._fresh.append(text)

    @property
    def stop_string(self) -> str | None:
        """The one that ended the text."""
        return None if self._stops is None else self._stops.found

    @property
    def thinking(self) -> bool:
        """Whether the next token belongs to a thought."""
        return self._thoughts is not None and self._thoughts.thinking

    def close(self) -> bool:
        """Releases the text held back; True if a stop string ends the text."""
        tail = self._detokenizer.flush()
        if self._stops is not None:
            tail = self._stops.push(tail)[0] + self._stops.flush()
        self._add(*self._split(tail))
        if self._thoughts is not None:
            self._add(*self._thoughts.flush())
        if self._calls is not None:
            self._fresh.append(self._calls.flush())
        return self._stops is not None and self._stops.matched

    def take(self) -> tuple[str, str, tuple[CallPart, ...]]:
        """What became final since the last call: of the text, of the thought and of the calls."""
        text, thought = "", self._fresh_thought
        if self._fresh:
            text = self.ready
            self._fresh.clear()
            if text:
                self._parts.append(text)
        if thought:
            self._thought_parts.append(thought)
            self._fresh_thought = ""
        return text, thought, () if self._calls is None else self._calls.take()

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Those that are complete."""
        return () if self._calls is None else self._calls.calls

    @property
    def ready_thought(self) -> str:
        """What of the thought is final but not yet taken."""
        return self._fresh_thought

    @property
    def ready(self) -> str:
        """The text that is final but not yet taken."""
        return "".join(self._fresh)

    def skip(self, shown: str, thought: str = "", calls: Sequence[str] = ()) -> bool:
        """Takes ``shown``, its ``thought`` and the arguments of ``calls``, which readers already
        have; False if what is ready differs."""
        ready = self.ready
        if not ready.startswith(shown) or not self._fresh_thought.startswith(thought):
            return False
        if calls and (self._calls is None or not self._calls.skip(calls)):
            return False
        self._thought_parts.append(thought)
        self._fresh_thought = self._fresh_thought[len(thought) :]
        self._parts.append(shown)
        self._fresh[:] = [ready[len(shown) :]]
        return True

    @property
    def released(self) -> str:
        """All text taken so far."""
        return "".join(self._parts)

    @property
    def thought(self) -> str | None:
        """All of the thought taken so far; None if there is none."""
        return "".join(self._thought_parts) or None
