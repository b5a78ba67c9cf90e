"""Says which texts a grammar in GBNF describes: slowly, and with nothing of the worker's code."""

from __future__ import annotations

from collections.abc import Callable

Ends = Callable[["PlainGbnf", str, int], set[int]]
"""Where the texts that begin at a place, and that a part of a grammar describes, may end."""

ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class PlainGbnf:
    """A grammar without tokens, which must have no error."""

    def __init__(self, grammar: str) -> None:
        self.rules: dict[str, Ends] = {}
        self._ends: dict[tuple[str, int], set[int]] = {}
        self._left = grammar
        self._skip()
        while self._left:
            name = self._name()
            self._skip()
            self._drop("::=")
            self.rules[name] = self._choice()

    def describes(self, text: str) -> bool:
        return len(text) in self._ends_of_root(text)

    def _ends_of_root(self, text: str) -> set[int]:
        # Rules may need each other at the same place, so all are read again until nothing is new.
        self._ends = {("root", 0): set()}
        while True:
            before = {key: set(ends) for key, ends in self._ends.items()}
            for name, at in before:
                self._ends[name, at] |= self.rules[name](self, text, at)
            if self._ends == before:
                return before["root", 0]

    def ends(self, name: str, at: int) -> set[int]:
        """What is known so far of a rule."""
        return self._ends.setdefault((name, at), set())

    # Reading a grammar.

    def _skip(self) -> None:
        while self._left[:1].isspace() or self._left.startswith("#"):
            if self._left.startswith("#"):
                self._left = self._left.partition("\n")[2]
            else:
                self._left = self._left[1:]

    def _drop(self, text: str) -> None:
        assert self._left.startswith(text), self._left
        self._left = self._left[len(text) :]
        self._skip()

    def _name(self) -> str:
        length = 0
        while self._left[length : length + 1].isalnum() or self._left[length : length + 1] in (
            "-",
            "_",
        ):
            length += 1
        assert length, self._left
        name, self._left = self._left[:length], self._left[length:]
        return name

    def _choice(self) -> Ends:
        ways = [self._sequence()]
        while self._left.startswith("|"):
            self._drop("|")
            ways.append(self._sequence())
        return lambda grammar, text, at: {end for way in ways for end in way(grammar, text, at)}

    def _sequence(self) -> Ends:
        parts: list[Ends] = []
        while self._left and self._left[0] not in "|)":
            if self._begins_a_rule():
                break
            parts.append(self._repeated(self._part()))

        def ends(grammar: PlainGbnf, text: str, at: int) -> set[int]:
            places = {at}
            for part in parts:
                places = {end for place in places for end in part(grammar, text, place)}
            return places

        return ends

    def _begins_a_rule(self) -> bool:
        rest = self._left.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
        return rest != self._left and rest.lstrip(" \t").startswith("::=")

    def _part(self) -> Ends:
        first = self._left[0]
        if first == "(":
            self._drop("(")
            choice = self._choice()
            self._drop(")")
            return choice
        if first == ".":
            self._drop(".")
            return lambda _, text, at: {at + 1} if at < len(text) else set()
        if first == '"':
            return self._text()
        if first == "[":
            return self._class()
        name = self._name()
        self._skip()
        return lambda grammar, _, at: grammar.ends(name, at)

    def _character(self) -> tuple[str, bool]:
        """The next one, and whether it is escaped."""
        first, self._left = self._left[0], self._left[1:]
        if first != "\\":
            return first, False
        kind, self._left = self._left[0], self._left[1:]
        if (length := HEX_DIGITS.get(kind)) is None:
            return ESCAPES.get(kind, kind), True
        code, self._left = self._left[:length], self._left[length:]
        return chr(int(code, 16)), True

    def _text(self) -> Ends:
        self._left = self._left[1:]
        wanted = ""
        while self._left[0] != '"':
            wanted += self._character()[0]
        self._drop('"')
        return lambda _, text, at: {at + len(wanted)} if text.startswith(wanted, at) else set()

    def _class(self) -> Ends:
        self._left = self._left[1:]
        negated = self._left[0] == "^"
        self._left = self._left[negated:]
        read: list[tuple[str, bool]] = []
        while self._left[0] != "]":
            read.append(self._character())
        self._drop("]")
        ranges: list[tuple[str, str]] = []
        while read:
            (low, _), *read = read
            high = low
            if len(read) > 1 and read[0] == ("-", False):
                _, (high, _), *read = read
            ranges.append((low, high))

        def ends(_: PlainGbnf, text: str, at: int) -> set[int]:
            if at == len(text) or any(a <= text[at] <= b for a, b in ranges) is negated:
                return set()
            return {at + 1}

        return ends

    def _repeated(self, part: Ends) -> Ends:
        while self._left and self._left[0] in "*+?{":
            mark = self._left[0]
            low, high = {"*": "0,", "+": "1,", "?": "0,1"}.get(mark, ","), ""
            if mark == "{":
                low, _, self._left = self._left[1:].partition("}")
                self._skip()
            else:
                self._drop(mark)
            low, comma, high = low.partition(",")
            most = int(high) if high.strip() else None if comma else int(low)
            part = _times(part, int(low), most)
        return part


def _times(part: Ends, low: int, high: int | None) -> Ends:
    def ends(grammar: PlainGbnf, text: str, at: int) -> set[int]:
        places, found = {at}, {at} if low == 0 else set()
        count = 0
        seen: list[set[int]] = []
        # Without an upper bound, places that come again bring nothing new.
        while places and (high is None or count < high):
            count += 1
            places = {end for place in places for end in part(grammar, text, place)}
            if count >= low:
                if high is None and places in seen:
                    break
                seen.append(places)
                found |= places
        return found

    return ends
