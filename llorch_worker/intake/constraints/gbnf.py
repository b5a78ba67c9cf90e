"""Grammars in GBNF, llama.cpp's notation, as Lark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from typing import Final, NoReturn, Protocol

from llorch_worker.contract import InvalidRequest, describe
from llorch_worker.intake.constraints.character_rules import (
    CharacterRules,
    Item,
    Range,
    Sequence,
)

_ROOT: Final = "root"
_DEEPEST_GROUP: Final = 200
_MOST_REPETITIONS: Final = 100_000

_IS_GBNF = re.compile(r"^[ \t\ufeff]*[\w-]+[ \t]*::=", re.MULTILINE)
_WORDS = re.compile(
    r"""
      (?P<space> [ \t\r\n\ufeff]+ | \#[^\r\n]* )
    | (?P<rule> [A-Za-z0-9_-]+ (?= [ \t]*::= ) ) [ \t]*::=
    | (?P<name> [A-Za-z0-9_-]+ )
    | " (?P<text> (?: [^"\\] | \\. )* ) "
    | \[ (?P<negated> \^? ) (?P<characters> (?: [^]\\] | \\. )* ) \]
    | (?P<any> \. )
    | (?P<not> !? ) < (?: \[ (?P<id> [0-9]{1,10} ) \] | (?P<token> [^[>\s] [^>\r\n]* ) ) >
    | (?P<mark> [*+?] )
    | \{ \s* (?P<low> [0-9]{1,10} ) \s* (?: (?P<comma>,) \s* (?P<high> [0-9]{1,10} )? \s* )? \}
    | (?P<bar> \| )
    | (?P<open> \( )
    | (?P<close> \) )
    """,
    re.VERBOSE | re.DOTALL,
)
_UNCLOSED = {
    '"': 'a text has no closing "',
    "[": "a class of characters has no closing ]",
    "{": "a repetition must be {m}, {m,} or {m,n}",
    "<": "a token must be <[id]> or <name>",
    "!": "! must stand before a token: !<[id]> or !<name>",
    ":": "::= must follow the name of a rule",
}
_CHARACTER = re.compile(
    r"""\\ (?: x ([0-9A-Fa-f]{2}) | u ([0-9A-Fa-f]{4}) | U ([0-9A-Fa-f]{8}) | ([tnr\\"[\]-]) )
    | ([^\\])""",
    re.VERBOSE | re.DOTALL,
)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r"}
_UNBOUNDED = re.compile(r"[ \t]*[*+]")
_MARKS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class ControlTokens(Protocol):
    """Those of the vocabulary, which a grammar may name."""

    @property
    def control(self) -> Mapping[int, str]:
        """The spelling of each."""
        ...

    @property
    def eos_ids(self) -> Set[int]: ...


def is_gbnf(grammar: str) -> bool:
    """Whether a line of ``grammar`` begins like a rule of GBNF: Lark has no such line."""
    return _IS_GBNF.search(grammar) is not None


def as_lark(field: str, grammar: str, tokens: ControlTokens) -> str:
    """``grammar``, which is GBNF, in Lark. Raises ``InvalidRequest`` with the line of an error."""
    try:
        return _Reader(grammar, tokens).rules.lark(_ROOT)
    except ValueError as error:
        rule = f"must be GBNF: {error}"
        raise InvalidRequest.from_fault(field, rule, describe(grammar)) from None


class _Reader:
    """Reads the rules of a grammar. Line feeds may stand anywhere between two words."""

    def __init__(self, grammar: str, tokens: ControlTokens) -> None:
        """Raises ValueError with the line of an error."""
        self.rules = CharacterRules()
        self._grammar = grammar
        self._tokens = tokens
        self._at = 0
        self._names = {_ROOT: _ROOT}
        """Of the rules, in Lark."""
        self._used: dict[str, int] = {}
        """Where each rule is used first."""
        # Of the rule and the groups that are open: where each begins, its name, its alternatives.
        self._open: list[tuple[int, str, list[Sequence]]] = []
        self._read()

    def _read(self) -> None:
        while self._at < len(self._grammar):
            word = _WORDS.match(self._grammar, self._at)
            if word is None:
                self._fail(
                    _UNCLOSED.get(self._grammar[self._at], "a character that has no meaning")
                )
            if word["space"] is None:
                if word["rule"] is not None:
                    self._begin_rule(word["rule"])
                elif not self._open:
                    self._fail("a rule must begin as name ::=")
                else:
                    self._take(word)
            self._at = word.end()
        self._end_rule()
        for name, at in self._used.items():
            if self._names[name] not in self.rules:
                self._at = at
                self._fail("no line defines the rule that is used here")
        if _ROOT not in self.rules:
            raise ValueError("no line defines the rule root")

    def _take(self, word: re.Match[str]) -> None:
        _, _, alternatives = self._open[-1]
        sequence = alternatives[-1]
        match word.lastgroup:
            case "name":
                self._used.setdefault(word["name"], self._at)
                sequence.append(Item(self._rule(word["name"])))
            case "text":
                sequence.append(self._text(word["text"]))
            case "characters":
                sequence.append(self._class(word["characters"], negated=bool(word["negated"])))
            case "any":
                sequence.append(self.rules.character([], negated=True))
            case "id" | "token":
                sequence.append(self._token(word))
            case "mark":
                self._repeat(sequence, *_MARKS[word["mark"]])
            case "low" | "comma" | "high":
                low = int(word["low"])
                high = int(word["high"]) if word["high"] else None if word["comma"] else low
                self._repeat(sequence, low, high)
            case "bar":
                alternatives.append([])
            case "open":
                if len(self._open) > _DEEPEST_GROUP:
                    self._fail(f"groups must not be nested deeper than {_DEEPEST_GROUP}")
                self._open.append((self._at, "", [[]]))
            case "close":
                if len(self._open) == 1:
                    self._fail("a ) without its (")
                self._open.pop()
                self._open[-1][2][-1].append(self.rules.group(alternatives))

    def _begin_rule(self, name: str) -> None:
        self._end_rule()
        self._open = [(self._at, self._rule(name), [[]])]

    def _end_rule(self) -> None:
        if len(self._open) > 1:
            self._at = self._open[-1][0]
            self._fail("a ( without its )")
        for _, name, alternatives in self._open:
            # llama.cpp, too, takes the last of those with the same name.
            self.rules.define(name, alternatives)

    def _rule(self, name: str) -> str:
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _text(self, text: str) -> Item:
        items = [self._character([(code, code)]) for code, _ in self._characters(text)]
        # As one item, for a repetition that may follow.
        return items[0] if len(items) == 1 else self.rules.group([items])

    def _class(self, text: str, *, negated: bool) -> Item:
        if not text:
            self._fail("a class without characters")
        ranges: list[Range] = []
        characters = list(self._characters(text))
        at = 0
        while at < len(characters):
            low = high = characters[at][0]
            if at + 2 < len(characters) and characters[at + 1] == (ord("-"), False):
                high = characters[at + 2][0]
                at += 2
            if low > high:
                self._fail("a range of characters must begin with the lower one")
            ranges.append((low, high))
            at += 1
        return self._character(ranges, negated=negated)

    def _character(self, ranges: list[Range], *, negated: bool = False) -> Item:
        try:
            return self.rules.character(ranges, negated=negated)
        except ValueError as error:
            self._fail(str(error))

    def _characters(self, text: str) -> Iterator[tuple[int, bool]]:
        """The code of each character of ``text``, and whether it is escaped."""
        at = 0
        while at < len(text):
            found = _CHARACTER.match(text, at)
            if found is None:
                self._fail(
                    r"an escape must be one of \n \r \t \\ \" \[ \] \- \xHH \uHHHH \UHHHHHHHH"
                )
            *codes, escaped, plain = found.groups()
            code = next((int(code, 16) for code in codes if code), None)
            if code is None:
                code = ord(plain or _CONTROL.get(escaped, escaped))
            yield code, plain is None
            at = found.end()

    def _token(self, word: re.Match[str]) -> Item:
        control = self._tokens.control
        if word["id"] is not None:
            token_id = int(word["id"]) if int(word["id"]) in control else None
        else:
            token_id = self._spelt.get(f"<{word['token']}>")
        if token_id is None:
            self._fail("a token must be a control token of the model; write others as text")
        if token_id in self._tokens.eos_ids:
            self._fail("a token must not be one that ends the text: the grammar's end does")
        if not word["not"]:
            return Item(f"<[{token_id}]>")
        if not _UNBOUNDED.match(self._grammar, word.end()):
            self._fail("* or + must follow !<...>: a grammar counts characters, not tokens")
        name = f"not{token_id}"
        if name not in self.rules:
            self.rules.define(name, self._all_but(token_id))
        return Item(name)

    def _all_but(self, token_id: int) -> list[Sequence]:
        """Any character and any control token, but for this one and those that end the text."""
        alternatives = [[self.rules.character([], negated=True)]]
        others = ",".join(
            f"{low}-{high}"
            for first, last in self._runs
            for low, high in (
                ((first, token_id - 1), (token_id + 1, last))
                if first <= token_id <= last
                else ((first, last),)
            )
            if low <= high
        )
        if others:
            alternatives.append([Item(f"<[{others}]>")])
        return alternatives

    @cached_property
    def _spelt(self) -> Mapping[str, int]:
        """The control tokens by their spellings, the first of those that are alike."""
        return {text: token_id for token_id, text in reversed([*self._tokens.control.items()])}

    @cached_property
    def _runs(self) -> list[Range]:
        """The ids of control tokens that end no text. Most models have them side by side."""
        ids = sorted(self._tokens.control.keys() - self._tokens.eos_ids)
        runs: list[Range] = []
        for token_id in ids:
            first = runs.pop()[0] if runs and runs[-1][1] == token_id - 1 else token_id
            runs.append((first, token_id))
        return runs

    def _repeat(self, sequence: Sequence, low: int, high: int | None) -> None:
        """Repeats the last item of ``sequence``."""
        if not sequence:
            self._fail("nothing stands before the repetition")
        if high is not None and high < low:
            self._fail("a repetition {m,n} must have m <= n")
        item = self.rules.repeated(sequence.pop(), low, high)
        if max(item.low, item.high or 0) > _MOST_REPETITIONS:
            self._fail(f"a repetition must be of at most {_MOST_REPETITIONS}")
        sequence.append(item)

    def _fail(self, what: str) -> NoReturn:
        line = self._grammar.count("\n", 0, self._at) + 1
        raise ValueError(f"line {line}: {what}")
