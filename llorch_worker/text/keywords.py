"""Arguments as Python writes them in a call, and as JSON."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[^\W\d]\w*)|(?P<equals>=)|.""",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_STRING_PART = re.compile(r'\\.|"', re.DOTALL)


def as_keywords(arguments: str) -> str:
    """An object in JSON as ``city="Bern", days=2``."""
    return ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in json.loads(arguments).items()
    )


def from_keywords(spelt: str) -> str | None:
    """The object in JSON; None if they are no keywords, or have values that JSON has not."""
    parts, depth = [], 0
    spelt = spelt.rstrip().removesuffix(",")
    for token in _TOKEN.finditer(spelt):
        text = token[0]
        depth += (text in "([{") - (text in ")]}")
        match token.lastgroup:
            case "string":
                parts.append(f'"{_STRING_PART.sub(_in_json, text[1:-1])}"')
            case "word":
                is_name = depth == 0 and spelt[token.end() :][:9].lstrip().startswith("=")
                parts.append(json.dumps(text) if is_name else _WORDS.get(text, text))
            case "equals" if depth == 0:
                parts.append(": ")
            case _:
                parts.append(text)
    written = f"{{{''.join(parts)}}}"
    try:
        json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return written


def _in_json(part: re.Match[str]) -> str:
    return {"\\'": "'", '"': '\\"'}.get(part[0], part[0])


def _refuse(constant: str) -> None:
    raise ValueError(constant)


class CallEnd:
    """Finds the bracket that ends the arguments, each character looked at once."""

    def __init__(self) -> None:
        self._depth = 1
        self._quote = ""
        self._escaped = False

    def feed(self, text: str, at: int) -> int | None:
        """Where the text after the bracket begins in this piece; None if it does not come."""
        for place in range(at, len(text)):
            char = text[place]
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None
