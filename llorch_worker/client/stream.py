"""Reading a job's event stream: the part that needs no connection."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llorch_worker.broker import keys
from llorch_worker.broker.jobs.results import StoredState, terminal_event
from llorch_worker.contract import (
    TERMINAL_EVENTS,
    CallPart,
    Event,
    Restarted,
    Started,
    Tokens,
    Vectors,
    decode_event,
)

FROM_THE_START = "0"
AWAITED_S = 5
"""How long a client that submits a job to read its stream counts as reading it before it does."""
RECHECK_S = 1.0
"""How often a reader looks again at a job of which Redis has no trace."""
READ_COUNT = 200
"""Entries that are read at once."""
_FORMAT = re.compile(
    r"(\d{1,20}-\d{1,20})(?::(?:(\d{1,12}\.\d{1,12}(?:,\d{1,12}\.\d{1,12}){0,15})|(end)))?",
    re.ASCII,
)


class StreamEntry(NamedTuple):
    """One event and the id after which to resume: ``job.stream(from_id=entry.entry_id)``."""

    entry_id: str
    event: Event


@dataclass
class Seen:
    """What a reader has of one choice."""

    tokens: int = 0
    chars: int = 0
    """Of thought, text and calls, in this order."""
    _chars_before: dict[int, int] = field(default_factory=lambda: {0: 0})
    """The characters before each token at which an event began or ended."""
    _bare: int = 0
    """The characters behind the last token of this run, which came without an id."""

    def begin(self) -> None:
        """A run begins, which knows of no characters behind the last token."""
        self._bare = 0

    def rest(self, event: Tokens) -> Tokens | None:
        """The part of ``event`` that the reader has not seen, and has then."""
        before = self._chars_before.get(event.index)
        start = self.chars if before is None else before + self._bare
        known = min(max(0, self.tokens - event.index), len(event.ids))
        end, end_chars = event.index + len(event.ids), start + _chars_of(event)
        if event.ids:
            self._chars_before[end], self._bare = end_chars, 0
        else:
            self._bare += end_chars - start
        event = _without(event, known, max(0, self.chars - start))
        self.tokens, self.chars = max(end, self.tokens), max(end_chars, self.chars)
        return event if event.has_any else None

    def new(self, event: Vectors) -> Vectors | None:
        """The part of ``event`` that the reader has not seen, and has then: ``tokens`` counts
        texts."""
        known = min(max(0, self.tokens - event.index), event.count)
        self.tokens = max(self.tokens, event.index + event.count)
        if known == event.count:
            return None
        return event.rest(known) if known else event


def _chars_of(event: Tokens) -> int:
    calls = sum(map(_chars_of_call, event.tool_calls or ()))
    return len(event.reasoning_content or "") + len(event.text) + calls


def _chars_of_call(part: CallPart) -> int:
    """Its beginning is one: the id and the name come at once."""
    return (part.id is not None) + len(part.arguments)


def _without(event: Tokens, ids: int, chars: int) -> Tokens:
    """``event`` without its first ``ids`` and its first ``chars``."""
    if not ids and not chars:
        return event
    thought, text, calls = event.reasoning_content or "", event.text, []
    thought, chars = thought[chars:], max(0, chars - len(thought))
    text, chars = text[chars:], max(0, chars - len(text))
    for part in event.tool_calls or ():
        length = _chars_of_call(part)
        if not chars:
            calls.append(part)
        elif chars < length:
            arguments = part.arguments[chars - (part.id is not None) :]
            calls.append(CallPart(index=part.index, arguments=arguments))
        chars = max(0, chars - length)
    new = {
        "index": event.index + ids,
        "ids": event.ids[ids:],
        "text": text,
        "reasoning_content": thought or None,
        "tool_calls": tuple(calls) or None,
        "logprobs": event.logprobs and event.logprobs[ids:],
    }
    return event.model_copy(update=new)


@dataclass
class Position:
    """What a reader has of a stream: the last entry, and the tokens and characters of each choice.

    The entry's id alone would not do: a Redis that lost its last writes gets them again from the
    job's next run, in other entries. Its text is ``<entry>:<tokens>.<characters>,...``, or
    ``<entry>:end`` after the terminal event.
    """

    entry_id: str = "0-0"
    ended: bool = False
    choices: dict[int, Seen] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Position:
        """Raises ``ValueError`` if this is not the text of a position."""
        match = _FORMAT.fullmatch(text)
        if match is None:
            raise ValueError("not an id of an event")
        pairs = [each.split(".") for each in (match[2] or "").split(",") if each]
        choices = [Seen(int(tokens), int(chars)) for tokens, chars in pairs]
        return cls(match[1], match[3] is not None, dict(enumerate(choices)))

    def __str__(self) -> str:
        if self.ended:
            return f"{self.entry_id}:end"
        each = [self.choices.get(i, Seen()) for i in range(max(self.choices, default=-1) + 1)]
        seen = ",".join(f"{choice.tokens}.{choice.chars}" for choice in each)
        return f"{self.entry_id}:{seen}" if seen else self.entry_id

    def rest(self, entry: StreamEntry) -> Event | None:
        """What of this entry is new to the reader, who then has it."""
        event: Event | None = entry.event
        after = _number(entry.entry_id) > _number(self.entry_id)
        if isinstance(event, Vectors):
            event = self.choices.setdefault(0, Seen(event.index)).new(event)
        elif isinstance(event, Tokens):
            # A reader that begins within the stream has no earlier tokens.
            event = self.choices.setdefault(event.choice, Seen(event.index)).rest(event)
        elif isinstance(event, TERMINAL_EVENTS):
            self.ended = True
        elif isinstance(event, Started):
            for each in self.choices.values():
                each.begin()
            event = event if after else None
        elif not after:
            event = None
        elif isinstance(event, Restarted):
            self.choices.clear()
        if after:
            self.entry_id = entry.entry_id
        return event


def _number(entry_id: str) -> tuple[int, int]:
    first, _, second = entry_id.partition("-")
    return int(first), int(second or 0)


class StreamCursor:
    """Reads the stream of one job, from the entry after ``from_id`` or from what is new after a
    :class:`Position`, which moves on.

    ``timeout``: how many seconds a reader waits for an event; None: without limit.
    """

    def __init__(self, job_id: str, from_id: str | Position, timeout: float | None) -> None:
        self.key = keys.events(job_id)
        self.last_id = from_id if isinstance(from_id, str) else FROM_THE_START
        self._position = Position() if isinstance(from_id, str) else from_id
        self._job_id = job_id
        self._timeout = timeout
        self._heard_at_s = time.monotonic()
        self._model: str | None = None
        """The fingerprint of the last event ``started`` that was read."""

    @property
    def ended(self) -> bool:
        return self._position.ended

    def left_s(self) -> float | None:
        """How long the next event may take."""
        return None if self._timeout is None else max(0.001, self._timeout - self._silent_s())

    def news(self, message: str) -> Iterator[StreamEntry]:
        """:meth:`entries` of a message on the stream's channel. What was read is skipped."""
        first, *events = message.split("\n")
        last = _number(self.last_id)
        numbered = (
            (f"{number}-0", {"event": each}) for number, each in enumerate(events, int(first))
        )
        new = [(entry_id, fields) for entry_id, fields in numbered if _number(entry_id) > last]
        return self.entries([(self.key, new)] if new else [], None)

    def entries(self, reply: Any, state: StoredState | None) -> Iterator[StreamEntry]:
        """The entries of an XREAD reply, without tokens that the reader has.

        If the reply is empty but ``state`` says that the job has ended, the terminal event is made
        from the result: the stream may have expired, or its last write may have been lost with the
        worker.

        Raises:
            TimeoutError: no event came in time.
        """
        if reply:
            for entry_id, fields in reply[0][1]:
                self.last_id = entry_id
                event = decode_event(fields["event"])
                if isinstance(event, Started):
                    if self._position.choices and self._model not in (
                        None,
                        event.model_fingerprint,
                    ):
                        # Redis lost the event that says so, with the tokens that were read.
                        self._position.choices.clear()
                        again = Restarted(worker=event.worker, attempt=event.attempt)
                        yield StreamEntry(entry_id, again)
                    self._model = event.model_fingerprint
                rest = self._position.rest(StreamEntry(entry_id, event))
                if rest is not None:
                    yield StreamEntry(entry_id, rest)
                if self.ended:
                    return
            # The reader's own time with the entries is no silence.
            self._heard_at_s = time.monotonic()
        elif state is not None and state.end is not None:
            self._position.ended = True
            yield StreamEntry(self.last_id, terminal_event(state.end))
        elif self._timeout is not None and self._silent_s() > self._timeout:
            raise TimeoutError(f"no event of job {self._job_id} within {self._timeout} s")

    def _silent_s(self) -> float:
        return time.monotonic() - self._heard_at_s
