"""What a reader of a job's events has seen, as the id of each server-sent event."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from llorch_worker.client.stream import StreamEntry
from llorch_worker.contract import TERMINAL_EVENTS, Event, Tokens

_FORMAT = re.compile(
    r"(\d{1,20}-\d{1,20})(?::(?:(\d{1,12}\.\d{1,12}(?:,\d{1,12}\.\d{1,12}){0,15})|(end)))?",
    re.ASCII,
)


@dataclass
class _Seen:
    tokens: int = 0
    chars: int = 0


@dataclass
class ReaderPosition:
    """The last entry, and the tokens and characters of each choice.

    The entry's id alone would not do: a Redis that lost its last writes gets them again from the
    job's next run, in other entries. Its text is ``<entry>:<tokens>.<characters>,...``, or
    ``<entry>:end`` after the terminal event.
    """

    entry_id: str = "0-0"
    ended: bool = False
    choices: list[_Seen] = field(default_factory=list)
    """What the reader has."""
    _passed: list[_Seen] = field(default_factory=list)
    """What the stream has brought since it was read from its start."""

    @classmethod
    def parse(cls, text: str) -> ReaderPosition:
        """Raises ``ValueError`` if this is no id that a reader was given."""
        match = _FORMAT.fullmatch(text)
        if match is None:
            raise ValueError("not an id of an event")
        pairs = [each.split(".") for each in (match[2] or "").split(",") if each]
        choices = [_Seen(int(tokens), int(chars)) for tokens, chars in pairs]
        return cls(match[1], match[3] is not None, choices)

    def __str__(self) -> str:
        if self.ended:
            return f"{self.entry_id}:end"
        seen = ",".join(f"{each.tokens}.{each.chars}" for each in self.choices)
        return f"{self.entry_id}:{seen}" if seen else self.entry_id

    def rest(self, entry: StreamEntry) -> Event | None:
        """What of this entry is new to the reader, who then has it.

        Takes every entry of the stream from its start, in order.
        """
        event: Event | None = entry.event
        after = _number(entry.entry_id) > _number(self.entry_id)
        if isinstance(event, Tokens):
            event = self._rest(event)
        elif not after and not isinstance(event, TERMINAL_EVENTS):
            event = None
        if after:
            self.entry_id = entry.entry_id
        self.ended = isinstance(event, TERMINAL_EVENTS)
        return event

    def _rest(self, event: Tokens) -> Tokens | None:
        for choices in (self.choices, self._passed):
            choices.extend(_Seen() for _ in range(len(choices), event.choice + 1))
        seen, passed = self.choices[event.choice], self._passed[event.choice]
        known = min(max(0, seen.tokens - event.index), len(event.ids))
        known_chars = min(max(0, seen.chars - passed.chars), len(event.text))
        passed.tokens = event.index + len(event.ids)
        passed.chars += len(event.text)
        seen.tokens = max(seen.tokens, passed.tokens)
        seen.chars = max(seen.chars, passed.chars)
        ids, text = event.ids[known:], event.text[known_chars:]
        if not ids and not text:
            return None
        if not known and not known_chars:
            return event
        return event.model_copy(
            update={
                "index": event.index + known,
                "ids": ids,
                "text": text,
                "logprobs": event.logprobs and event.logprobs[known:],
            }
        )


def _number(entry_id: str) -> tuple[int, int]:
    first, _, second = entry_id.partition("-")
    return int(first), int(second or 0)
