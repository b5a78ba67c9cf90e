"""Calls of tools in an answer while it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from hashlib import blake2b
from typing import Any

from llorch_worker.contract import CallPart, FunctionCall, GenerationRequest, ToolCall
from llorch_worker.text.dialects import Dialect, Heads
from llorch_worker.text.thoughts import begun


class _Place(Enum):
    START = auto()
    """Only white space, or what may begin a call without a mark."""
    TEXT = auto()
    """Only a mark begins a call."""
    HEAD = auto()
    """Behind a mark, before the arguments."""
    ARGUMENTS = auto()
    TAIL = auto()
    """Behind the arguments, within the object of the call."""
    AFTER = auto()
    """Behind a call."""
    OVER = auto()
    """No more calls are read."""


class CallReader:
    """Splits an answer into text and calls.

    Text before the first call is text. What follows a call and is none is dropped: a model that
    goes on there makes up the answer of the tool. A call whose arguments end is complete; one that
    is cut off is in no result, and no part of it is text.
    """

    def __init__(
        self,
        dialect: Dialect,
        names: Iterable[str],
        call_id: Callable[[int], str],
        *,
        forced: bool = False,
        parallel: bool = True,
    ) -> None:
        """``forced``: the answer can be nothing but calls. Not ``parallel``: one call at most."""
        self._mark = dialect.mark
        self._end_mark = dialect.end_mark
        names = frozenset(names)
        self._names = names
        self._heads = Heads(dialect, sorted(names))
        self._call_id = call_id
        self._forced = forced
        self._parallel = parallel
        self._place = _Place.START
        self._held = ""
        self._may_close = False
        """Whether an object may end with the latest piece."""
        self._tailed = False
        self._end = _End(0)
        self._written: list[list[str]] = []
        """The name of each call and its arguments so far."""
        self._complete = 0
        self._taken: list[int] = []
        """Of each call, how many characters of the arguments were taken."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Those that are complete."""
        return tuple(
            ToolCall(id=self._call_id(index), function=FunctionCall(name=name, arguments=arguments))
            for index, (name, arguments) in enumerate(self._written[: self._complete])
        )

    def push(self, text: str) -> str:
        """What of the text before the calls ``text`` completes."""
        self._held += text
        self._may_close = "}" in text
        shown = ""
        while True:
            before = self._place, len(self._held)
            shown += self._advance()
            if (self._place, len(self._held)) == before:
                return shown

    def flush(self) -> str:
        """What is held back of the text before the calls, because the answer ends."""
        held, self._held = self._held, ""
        if self._place is _Place.START and not self._forced and not self._heads.named(held):
            return held
        return held if self._place is _Place.TEXT and not self._written else ""

    def take(self) -> tuple[CallPart, ...]:
        """What of the calls is new since the last time."""
        parts = []
        for index, (name, arguments) in enumerate(self._written):
            if index == len(self._taken):
                parts.append(CallPart(index=index, id=self._call_id(index), name=name))
                self._taken.append(0)
            if new := arguments[self._taken[index] :]:
                parts.append(CallPart(index=index, arguments=new))
                self._taken[index] = len(arguments)
        return tuple(parts)

    def skip(self, shown: Sequence[str]) -> bool:
        """Takes the arguments of each call that readers already have; False if others are
        there."""
        self._taken = [len(arguments) for arguments in shown]
        written = [arguments for _, arguments in self._written[: len(shown)]]
        return len(written) == len(shown) and all(map(str.startswith, written, shown))

    def _advance(self) -> str:
        match self._place:
            case _Place.START:
                return self._start()
            case _Place.TEXT:
                return self._text()
            case _Place.HEAD:
                return self._head()
            case _Place.ARGUMENTS:
                self._arguments()
            case _Place.TAIL:
                if (end := self._end.find(self._held)) is not None:
                    self._place, self._held = _Place.AFTER, self._held[end:]
                else:
                    self._held = ""
            case _Place.AFTER:
                self._after()
            case _Place.OVER:
                self._held = ""
        return ""

    def _start(self) -> str:
        start = self._held.lstrip()
        if self._mark and start.startswith(self._mark):
            self._place, self._held = _Place.HEAD, start.removeprefix(self._mark)
        elif not self._begin(marked=False) and not (
            (self._mark and self._mark.startswith(start))
            or self._heads.may_follow(start, marked=False)
        ):
            self._place = _Place.TEXT
        return ""

    def _text(self) -> str:
        text, mark, rest = self._held.partition(self._mark) if self._mark else (self._held, "", "")
        if mark:
            self._place, self._held = _Place.HEAD, rest
        else:
            shown = len(text) - begun(text, self._mark)
            text, self._held = text[:shown], text[shown:]
        return "" if self._written else text

    def _head(self) -> str:
        held = self._held
        if self._begin(marked=True) or self._heads.may_follow(held, marked=True):
            return ""
        value_at = held.lstrip(" \r\n\t[")
        if value_at.startswith("{"):
            # Its keys may stand in another order.
            if not self._may_close:
                return ""
            try:
                value, end = _DECODER.raw_decode(value_at)
            except (ValueError, RecursionError):
                return ""
            if (call := self._read(value)) is not None:
                self._written.append(call)
                self._held = value_at[end:]
                self._completed(_Place.AFTER)
                return ""
        elif not value_at:
            return ""
        self._place = _Place.TEXT
        return "" if self._written else self._mark + self._give_back()

    def _give_back(self) -> str:
        held, self._held = self._held, ""
        return held

    def _read(self, value: Any) -> list[str] | None:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if not isinstance(arguments, dict):
            return None
        return [value["name"], json.dumps(arguments, ensure_ascii=False)]

    def _begin(self, *, marked: bool) -> bool:
        found = self._heads.match(self._held, marked=marked)
        if found is None:
            return False
        name, end, self._tailed = found
        self._written.append([name, ""])
        self._place, self._held = _Place.ARGUMENTS, self._held[end:]
        self._end = _End(0)
        return True

    def _arguments(self) -> None:
        end = self._end.find(self._held)
        new = self._held if end is None else self._held[:end]
        self._written[-1][1] += new
        self._held = self._held[len(new) :]
        if end is not None:
            self._end = _End(1)
            self._completed(_Place.TAIL if self._tailed else _Place.AFTER)

    def _completed(self, place: _Place) -> None:
        self._complete = len(self._written)
        self._place = place if self._parallel else _Place.OVER

    def _after(self) -> None:
        self._held = rest = self._held.lstrip(" \r\n\t,;]}")
        if self._end_mark and rest.startswith(self._end_mark):
            self._held = rest.removeprefix(self._end_mark)
        elif self._mark and rest.startswith(self._mark):
            self._place, self._held = _Place.HEAD, rest.removeprefix(self._mark)
        elif rest and not self._begin(marked=False):
            marks = (self._mark, self._end_mark)
            if not any(mark.startswith(rest) for mark in marks) and not self._heads.may_follow(
                rest, marked=False
            ):
                self._place = _Place.TEXT


class _End:
    """Finds the end of a JSON object that comes in pieces; ``depth``: braces open so far."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Where the text after the object begins in this piece, which must not come again."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


def reader_of(
    request: GenerationRequest, dialect: Dialect, job_id: str, choice: int
) -> CallReader | None:
    """For one choice; None if its text is never a call. The ids are those of every attempt."""
    if not request.may_call:
        return None

    def call_id(index: int) -> str:
        place = f"{job_id}/{choice}/{index}".encode(errors="surrogatepass")
        return f"call_{blake2b(place, digest_size=12).hexdigest()}"

    return CallReader(
        dialect,
        (tool.function.name for tool in request.tools),
        call_id,
        forced=request.forces_a_call,
        parallel=request.calls_in_parallel,
    )


_DECODER = json.JSONDecoder()
