"""Calls of tools in an answer while it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from hashlib import blake2b

from llorch_worker.contract import CallPart, FunctionCall, GenerationRequest, ToolCall
from llorch_worker.contract.tools import MAX_ARGUMENTS_CHARS
from llorch_worker.text.dialects import Dialect
from llorch_worker.text.json_scanner import JsonScanner, NotJson
from llorch_worker.text.keywords import CallEnd, from_keywords
from llorch_worker.text.thoughts import begun

LONGEST_HEAD_CHARS = 4096
"""What is longer and no call's head yet is text, so that each piece costs little to look at."""
UNSURE_CHARS = 1024
"""Of arguments that no grammar holds. Readers get none before they are whole or longer."""
_FENCE = "```"
_SPACES = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "id", "index", "function", "tool_calls")
"""Those of a call without a mark: an object with any other is text at once."""
_WRAPPERS = ("tool_calls", "function")
"""Keys whose values may hold the call, from the outside in."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_STRING = re.compile(
    r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*(?P<end>"|\\?\Z|\\u[0-9a-fA-F]{0,3}\Z)'
)

Steps = Generator[None, None, bool]
"""Waits for more text at each ``yield``. Says whether what it looks for was there."""


class CallReader:
    """Splits an answer into text and calls.

    One reader for all models. A call is an object in JSON with a name and arguments, behind the
    dialect's mark, in a fence, or at the beginning of the answer; alone, in a list or wrapped; its
    keys in any order. Behind its mark, it is also what else the dialect writes.

    Text before the first call is text. Text after a call is dropped: a model that goes on there
    makes up the answer of the tool. A call whose arguments end is complete; one whose arguments are
    no JSON is text. A call that is cut off appears neither in the result nor in the text. One whose
    arguments are too long, or break behind the first :data:`UNSURE_CHARS`, counts as cut off.
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
        self._dialect = dialect
        self._marks = tuple(filter(None, (dialect.mark, *dialect.also)))
        self._names = frozenset(names)
        self._call_id = call_id
        self._forced = forced
        self._parallel = parallel
        self._text = ""
        self._at = 0
        """What of the text is read."""
        self._held: list[str] = []
        """What is read and may be a call."""
        self._held_chars = 0
        self._shown: list[str] = []
        self._is_text = False
        """Whether only a mark begins a call."""
        self._is_named = False
        """Whether what is held has the name of a function."""
        self._marked = False
        """Whether what is held stands behind a mark or a call."""
        self._reads = True
        self._shows = True
        self._written: list[list[str]] = []
        """The name of each call and its arguments so far."""
        self._complete = 0
        self._taken: list[int] = []
        """Of each call, how many characters of the arguments were taken."""
        self._steps = self._answer()
        next(self._steps)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Those that are complete."""
        return tuple(
            ToolCall(id=self._call_id(index), function=FunctionCall(name=name, arguments=arguments))
            for index, (name, arguments) in enumerate(self._written[: self._complete])
        )

    def push(self, text: str) -> str:
        """What of the text before the calls ``text`` completes."""
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._steps)
        shown = "".join(self._shown)
        self._shown.clear()
        return shown

    def flush(self) -> str:
        """What is held back of the text before the calls, because the answer ends."""
        self._steps.close()
        self._take(len(self._text) - self._at)
        if not self._is_text and (self._forced or self._is_named):
            self._held.clear()
        self._give_back()
        return "".join(self._shown)

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

    # What is read

    def _answer(self) -> Generator[None, None, None]:
        """The whole answer."""
        found = yield from self._opening()
        while self._reads:
            if found and (yield from self._call()):
                self._drop()
                found = self._reads and (yield from self._behind_a_call())
            else:
                self._give_back()
                found = self._reads and (yield from self._mark())
        while True:
            self._take(len(self._text) - self._at)
            self._give_back()
            yield

    def _opening(self, *, marked: bool = False) -> Steps:
        """Up to where a call may begin: past marks, fences and lists."""
        self._marked = marked
        while self._held_chars <= LONGEST_HEAD_CHARS:
            if (yield from self._literal(*self._marks)):
                self._marked = True
            elif (yield from self._literal(_FENCE)):
                while (yield from self._peek()).isalnum() or self._text[self._at] in "_-":
                    self._take(1)
                    if self._held_chars > LONGEST_HEAD_CHARS:
                        return False
            elif (char := (yield from self._peek())) in _SPACES or char == "[":
                self._take(1)
            else:
                named = self._marked and self._dialect.head.startswith("%s")
                return char == "{" or (named and _NAME.match(char) is not None)
        return False

    def _mark(self) -> Steps:
        """Gives back text up to the next mark or fence."""
        self._is_text = True
        marks = (*self._marks, _FENCE)
        while True:
            places = [at for mark in marks if (at := self._text.find(mark, self._at)) >= 0]
            if not places:
                rest = self._text[self._at :]
                places = [len(self._text) - max(begun(rest, mark) for mark in marks)]
            self._take(min(places) - self._at)
            self._give_back()
            if self._text.startswith(marks, self._at):
                self._is_text = False
                return (yield from self._opening())
            yield

    def _behind_a_call(self) -> Steps:
        """Past what ends the call, and its list, to where another may begin."""
        while True:
            if self._dialect.end_mark and (yield from self._literal(self._dialect.end_mark)):
                continue
            if (yield from self._peek()) not in f"{_SPACES},;]}}":
                return (yield from self._opening(marked=True))
            self._take(1)
            self._drop()

    def _call(self) -> Steps:
        if (yield from self._peek()) == "{":
            return (yield from self._object(_WRAPPERS))
        return (yield from self._own_form())

    def _object(self, wrappers: Sequence[str]) -> Steps:
        """A call in JSON. ``wrappers``: keys whose values may hold it instead."""
        self._take(1)
        name: str | None = None
        arguments: str | None = None
        while True:
            key = yield from self._string(None if self._marked else _KEYS)
            if key is None or not (yield from self._sign(":")):
                return False
            char = yield from self._after_spaces()
            if key in wrappers and char in "{[" and (char == "[") == (key == "tool_calls"):
                if char == "[":
                    self._take(1)
                    char = yield from self._after_spaces()
                inner = wrappers[wrappers.index(key) + 1 :]
                return char == "{" and (yield from self._object(inner))
            if key == "name" or (key == "function" and char == '"'):
                if (name := (yield from self._string(self._names))) is None:
                    return False
                self._is_named = True
            elif key in _ARGUMENTS and char == "{" and name is not None:
                return (yield from self._streamed(name, JsonScanner(within_object=True)))
            elif key in _ARGUMENTS:
                value = yield from self._value()
                if value is None or (arguments := _as_object(value)) is None:
                    return False
            elif key == "type" and not self._marked:
                if (yield from self._string(("function",))) is None:
                    return False
            elif (yield from self._value()) is None:
                return False
            if name is not None and arguments is not None:
                break
            if not (yield from self._sign(",")):
                if name is None or not (yield from self._sign("}")):
                    return False
                self._write_whole(name, "{}")
                return True
        self._write_whole(name, arguments)
        if self._reads:
            yield from self._scanned(JsonScanner(within_object=True))
        return True

    def _own_form(self) -> Steps:
        """A call in the dialect's form: a name, and arguments behind it."""
        while (found := _NAME.match(self._text, self._at)) and found.end() == len(self._text):
            if not any(name.startswith(found[0]) for name in self._names):
                return False
            yield
        if found is None or found[0] not in self._names:
            return False
        name = found[0]
        self._take(len(name))
        self._is_named = True
        if self._dialect.keywords:
            return (yield from self._sign("(")) and (yield from self._keywords(name))
        if (yield from self._literal("[CALL_ID]")):
            while (yield from self._peek()) not in "[{" and self._held_chars <= LONGEST_HEAD_CHARS:
                self._take(1)
        yield from self._literal("[ARGS]")
        return (yield from self._after_spaces()) == "{" and (yield from self._streamed(name, None))

    def _keywords(self, name: str) -> Steps:
        end, parts = CallEnd(), []
        while (at := end.feed(self._text, self._at)) is None:
            parts.append(self._take(len(self._text) - self._at))
            yield
        parts.append(self._take(at - self._at))
        arguments = from_keywords("".join(parts)[:-1])
        if arguments is not None:
            self._write_whole(name, arguments)
        return arguments is not None

    def _streamed(self, name: str, tail: JsonScanner | None) -> Steps:
        """Arguments behind their name. ``tail``: of the object around them.

        They come as they are written, once it is likely that they are JSON: text cannot follow a
        call that has begun.
        """
        scanner, waiting, chars, begun = JsonScanner(), "", 0, False
        while True:
            end, broken = self._fed(scanner)
            piece = self._take((len(self._text) if end is None else end) - self._at)
            chars += len(piece)
            if begun or self._forced or chars > UNSURE_CHARS or (end is not None and not broken):
                if not begun:
                    self._written.append([name, ""])
                    piece, begun = waiting + piece, True
                if not self._write(piece):
                    return True
            else:
                waiting += piece
            if broken:
                if begun:
                    self._reads = self._shows = False
                return begun
            if end is not None:
                break
            yield
        self._completed()
        if tail is not None and self._reads:
            yield from self._scanned(tail)
        return True

    # Calls

    def _write_whole(self, name: str, arguments: str) -> None:
        self._written.append([name, ""])
        # A lone surrogate has no bytes in UTF-8; JSON spells it as an escape.
        if self._write(arguments.encode(errors="backslashreplace").decode()):
            self._completed()

    def _write(self, arguments: str) -> bool:
        """Adds to the arguments of the last call; False if they are too long, which ends it."""
        room = MAX_ARGUMENTS_CHARS - len(self._written[-1][1])
        self._written[-1][1] += arguments[:room]
        if len(arguments) > room:
            self._reads = self._shows = False
        return len(arguments) <= room

    def _completed(self) -> None:
        self._complete = len(self._written)
        self._reads, self._shows = self._parallel, False

    # Pieces of text

    def _take(self, chars: int) -> str:
        """Reads on, and holds what is read."""
        text = self._text[self._at : self._at + chars]
        self._at += chars
        self._held.append(text)
        self._held_chars += chars
        return text

    def _drop(self) -> None:
        self._held.clear()
        self._held_chars = 0
        self._is_named = False

    def _give_back(self) -> None:
        """What is held is text, unless it stands behind a call."""
        if self._shows:
            self._shown += self._held
        self._drop()

    def _peek(self) -> Generator[None, None, str]:
        while self._at == len(self._text):
            yield
        return self._text[self._at]

    def _after_spaces(self) -> Generator[None, None, str]:
        for _ in range(LONGEST_HEAD_CHARS):
            if (char := (yield from self._peek())) not in _SPACES:
                return char
            self._take(1)
        return ""

    def _sign(self, sign: str) -> Steps:
        if (yield from self._after_spaces()) != sign:
            return False
        self._take(1)
        return True

    def _literal(self, *spellings: str) -> Steps:
        """One of ``spellings``, none of which begins another."""
        while not self._text.startswith(spellings, self._at):
            rest = self._text[self._at : self._at + max(map(len, spellings), default=0)]
            if not any(spelling.startswith(rest) for spelling in spellings):
                return False
            yield
        self._take(next(len(each) for each in spellings if self._text.startswith(each, self._at)))
        return True

    def _string(self, among: Collection[str] | None) -> Generator[None, None, str | None]:
        """A string in JSON as it is written, one of ``among`` unless that is None."""
        if (yield from self._after_spaces()) != '"':
            return None
        while True:
            found = _STRING.match(self._text, self._at)
            if found is None or found.end() - self._at > LONGEST_HEAD_CHARS:
                return None
            if found["end"] == '"':
                if among is not None and found[0][1:-1] not in among:
                    return None
                return self._take(len(found[0]))[1:-1]
            so_far = found[0][1:]
            if among is not None and not any(each.startswith(so_far) for each in among):
                return None
            yield

    def _value(self) -> Generator[None, None, str | None]:
        """Any value in JSON, as it is written."""
        yield from self._after_spaces()
        return (yield from self._scanned(JsonScanner()))

    def _scanned(self, scanner: JsonScanner) -> Generator[None, None, str | None]:
        """What the scanner reads; None if that is no JSON."""
        parts = []
        while True:
            end, broken = self._fed(scanner)
            parts.append(self._take((len(self._text) if end is None else end) - self._at))
            if end is not None:
                return None if broken else "".join(parts)
            yield

    def _fed(self, scanner: JsonScanner) -> tuple[int | None, bool]:
        """Where the scanner ends in this piece, and whether it breaks there."""
        try:
            return scanner.feed(self._text, self._at), False
        except NotJson as error:
            return error.at, True


def _as_object(value: str) -> str | None:
    """Arguments in JSON as an object: some models write null, or a string that holds it."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        value = json.loads(value).strip() or "{}"
        try:
            if JsonScanner().feed(value) != len(value):
                return None
        except NotJson:
            return None
    return value if value.startswith("{") else None


def reader_of(
    request: GenerationRequest, dialect: Dialect, job_id: str, choice: int
) -> CallReader | None:
    """For one choice; None if its text is never a call."""
    if not request.may_call:
        return None
    return CallReader(
        dialect,
        (tool.function.name for tool in request.tools),
        call_ids(job_id, choice),
        forced=request.forces_a_call,
        parallel=request.calls_in_parallel,
    )


def call_ids(job_id: str, choice: int) -> Callable[[int], str]:
    """Gives the calls of one choice their ids, those of every attempt."""

    def call_id(index: int) -> str:
        place = f"{job_id}/{choice}/{index}".encode(errors="surrogatepass")
        return f"call_{blake2b(place, digest_size=12).hexdigest()}"

    return call_id
