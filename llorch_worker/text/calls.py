"""Calls of tools in an answer while it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from hashlib import blake2b

from llorch_worker.contract import CallPart, FunctionCall, GenerationRequest, ToolCall
from llorch_worker.contract.tools import MAX_ARGUMENTS_CHARS
from llorch_worker.text.dialects import Dialect, Heads
from llorch_worker.text.thoughts import begun

LONGEST_HEAD_CHARS = 4096
"""What is longer and no call's head yet is text, so that each piece costs little to look at."""


class _Place(Enum):
    START = auto()
    """Only white space, or what may begin a call without a mark."""
    TEXT = auto()
    """Only a mark begins a call."""
    HEAD = auto()
    """Behind a mark, before the arguments."""
    OBJECT = auto()
    """Behind a mark, within an object whose keys may stand in another order."""
    ARGUMENTS = auto()
    TAIL = auto()
    """Behind the arguments, within the object of the call."""
    AFTER = auto()
    """Behind a call."""
    OVER = auto()
    """No more calls are read."""


class CallReader:
    """Splits an answer into text and calls.

    Text before the first call is text. Text after a call is dropped: a model that goes on there
    makes up the answer of the tool. A call whose arguments end is complete. A call that is cut off
    appears neither in the result nor in the text, and one whose arguments are too long counts as
    cut off.
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
        self._object: list[str] = []
        """What is held of an object that may be a call."""
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
        shown = ""
        while True:
            before = self._place, len(self._held)
            shown += self._advance()
            if (self._place, len(self._held)) == before:
                return shown

    def flush(self) -> str:
        """What is held back of the text before the calls, because the answer ends."""
        held, self._held = self._held, ""
        if self._written:
            return ""
        if self._place is _Place.TEXT:
            return held
        if self._forced:
            return ""
        match self._place:
            case _Place.START if not self._heads.named(held, marked=False):
                return held
            case _Place.HEAD if not self._heads.named(held, marked=True):
                return self._mark + held
            case _Place.OBJECT:
                return self._mark + "".join(self._object)
        return ""

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
            case _Place.OBJECT:
                return self._other_order()
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
        start = self._held[:LONGEST_HEAD_CHARS].lstrip()
        if self._mark and start.startswith(self._mark):
            self._place, self._held = _Place.HEAD, self._held.lstrip().removeprefix(self._mark)
        elif not self._begin(marked=False) and not self._may_begin(marked=False, mark=self._mark):
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
        if self._begin(marked=True) or self._may_begin(marked=True):
            return ""
        value = self._held[:LONGEST_HEAD_CHARS].lstrip(" \r\n\t[")
        if value.startswith("{"):
            before, brace, rest = self._held.partition("{")
            self._place, self._object, self._held = _Place.OBJECT, [before], brace + rest
            self._end = _End(0)
            return ""
        if not value and len(self._held) < LONGEST_HEAD_CHARS:
            return ""
        self._place = _Place.TEXT
        return "" if self._written else self._mark

    def _may_begin(self, *, marked: bool, mark: str = "") -> bool:
        """Whether more text may make what is held the head of a call, or ``mark``."""
        held = self._held
        return len(held) < LONGEST_HEAD_CHARS and (
            mark.startswith(held.lstrip()) or self._heads.may_follow(held, marked=marked)
        )

    def _other_order(self) -> str:
        """Gathers an object and decodes it when it ends."""
        end = self._end.find(self._held)
        new = self._held if end is None else self._held[:end]
        self._object.append(new)
        self._held = self._held[len(new) :]
        if end is None:
            return ""
        call = self._read("".join(self._object[1:]))
        if call is None:
            self._place = _Place.TEXT
            return "" if self._written else self._mark + "".join(self._object)
        name, arguments = call
        self._written.append([name, ""])
        if self._write(arguments):
            self._completed(_Place.AFTER)
        return ""

    def _read(self, spelt: str) -> tuple[str, str] | None:
        """The name and the arguments of an object that is a call."""
        try:
            value = json.loads(spelt)
            name = value.get("name")
            arguments = value.get("arguments", value.get("parameters"))
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if not (isinstance(name, str) and name in self._names and isinstance(arguments, dict)):
                return None
            written = json.dumps(arguments, ensure_ascii=False)
        except (ValueError, RecursionError):
            return None
        # A lone surrogate has no bytes in UTF-8; JSON spells it as an escape.
        return name, written.encode(errors="backslashreplace").decode()

    def _begin(self, *, marked: bool) -> bool:
        found = self._heads.match(self._held[:LONGEST_HEAD_CHARS], marked=marked)
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
        self._held = self._held[len(new) :]
        if self._write(new) and end is not None:
            self._end = _End(1)
            self._completed(_Place.TAIL if self._tailed else _Place.AFTER)

    def _write(self, arguments: str) -> bool:
        """Adds to the arguments of the last call; False if they are too long, which ends it."""
        room = MAX_ARGUMENTS_CHARS - len(self._written[-1][1])
        self._written[-1][1] += arguments[:room]
        if len(arguments) > room:
            self._place, self._held = _Place.OVER, ""
        return len(arguments) <= room

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
            if not any(self._may_begin(marked=False, mark=mark) for mark in marks):
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
