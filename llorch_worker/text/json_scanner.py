"""Whether what comes in pieces is JSON, and where it ends."""

from __future__ import annotations

import re

_SPACES = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_IN_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_WORDS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(
    r"-?|-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE][+-]?[0-9]*"
)
_LONGEST_WORD_CHARS = 4096
"""Python reads no integer of more than 4,300 digits."""


class NotJson(ValueError):
    """``at``: the first character of a piece that cannot go on."""

    def __init__(self, at: int) -> None:
        super().__init__("not JSON")
        self.at = at


class JsonScanner:
    """Finds the end of one JSON value, each character looked at once."""

    def __init__(self, *, within_object: bool = False) -> None:
        """``within_object``: the text goes on behind a value of an object."""
        self._closers = ["}"] if within_object else []
        self._next = "comma" if within_object else "value"
        """value, item (or the end of a list), key, member (or the end of an object), colon, comma
        (or an end); within a token: string, escape, word, or a digit of an escape: its number."""
        self._word = ""
        self._is_key = False
        self._digits = 0

    def feed(self, text: str, at: int = 0) -> int | None:
        """Where the text after the value begins in this piece, looked at from ``at`` on; None if
        the value goes on. Raises NotJson."""
        while at < len(text):
            match self._next:
                case "string":
                    at = self._string(text, at)
                case "escape":
                    self._escape(text, at)
                    at += 1
                case "word":
                    at = self._in_word(text, at)
                case _:
                    at = _SPACES.match(text, at).end()  # type: ignore[union-attr]
                    if at < len(text):
                        at = self._token(text, at)
            if self._next == "end":
                return at
        return None

    def _token(self, text: str, at: int) -> int:
        char, wanted = text[at], self._next
        if wanted in ("item", "member", "comma") and char in self._closers[-1:]:
            self._closers.pop()
            self._ended()
        elif wanted == "comma" and char == ",":
            self._next = "key" if self._closers[-1] == "}" else "value"
        elif wanted == "colon" and char == ":":
            self._next = "value"
        elif wanted in ("key", "member", "value", "item") and char == '"':
            self._is_key = wanted in ("key", "member")
            self._next = "string"
        elif wanted in ("value", "item") and char in "{[":
            self._closers.append("}" if char == "{" else "]")
            self._next = "member" if char == "{" else "item"
        elif wanted in ("value", "item") and (char in "-tfn" or char.isdecimal()):
            self._next, self._word = "word", ""
            return at
        else:
            raise NotJson(at)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        at = _IN_STRING.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] == "\\":
            self._next, self._digits = "escape", 0
        elif text[at] != '"':
            raise NotJson(at)
        elif self._is_key:
            self._next = "colon"
        else:
            self._ended()
        return at + 1

    def _escape(self, text: str, at: int) -> None:
        """One character behind a backslash: four digits follow a ``u``."""
        char = text[at]
        if self._digits:
            self._digits -= 1
            if char not in "0123456789abcdefABCDEF":
                raise NotJson(at)
        elif char == "u":
            self._digits = 4
        elif char not in '"\\/bfnrt':
            raise NotJson(at)
        if not self._digits:
            self._next = "string"

    def _in_word(self, text: str, at: int) -> int:
        end = _IN_WORD.match(text, at).end()  # type: ignore[union-attr]
        word = self._word + text[at:end]
        if not self._may_be_word(word):
            lengths = range(len(self._word) + 1, len(word) + 1)
            fits = (n for n in lengths if not self._may_be_word(word[:n]))
            raise NotJson(at + next(fits) - 1 - len(self._word))
        self._word = word
        if end < len(text):
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                raise NotJson(end)
            self._ended()
        return end

    @staticmethod
    def _may_be_word(word: str) -> bool:
        return len(word) <= _LONGEST_WORD_CHARS and (
            any(each.startswith(word) for each in _WORDS)
            or _NUMBER_BEGUN.fullmatch(word) is not None
        )

    def _ended(self) -> None:
        self._next = "comma" if self._closers else "end"
