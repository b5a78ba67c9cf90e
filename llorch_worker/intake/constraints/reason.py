"""llguidance's reasons without the user's words: errors are logged, and a schema is private."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MOST_CHARS = 200
_PIECE = re.compile(r"\d+\.\d+|\w+|[^\w\s]+")
_AROUND = "'\"`()[]{},:;."
"""What llguidance puts around words."""
_MARKS = frozenset("+*?<>=%$")
"""Further ones of its own."""
_REPEATED = re.compile(r"(.)\1\1")
_TOO_COMPLEX = re.compile(r"(?i)\blimits?\b|\bfuel\b|too (big|many (states|items|expressions))")
"""What llguidance says before it quotes anything, of whatever breaks one of its limits."""
_LINE_OF_A_REGEX_ERROR = "error: "

# JSON Schema's own words, which say what is wrong and nothing about the user.
_KEYWORDS = """
type object array string number integer boolean null properties required items prefixItems enum
additionalProperties additionalItems patternProperties propertyNames minProperties maxProperties
minItems maxItems uniqueItems contains minContains maxContains minLength maxLength pattern format
minimum maximum exclusiveMinimum exclusiveMaximum multipleOf const anyOf allOf oneOf not if then
else ref defs definitions id anchor dynamicRef schema dependentRequired dependentSchemas
unevaluatedProperties unevaluatedItems
"""
_WORDS_OF_REASONS = """
a an and are as at be by does error exist expected failed following for found from greater in
incompatible invalid is it json key keys lark less must name no of on or parse regex rule special
start syntax than the to token types unclosed unimplemented unknown unsatisfiable unsupported with
"""
_OURS = frozenset((_KEYWORDS + _WORDS_OF_REASONS).split()) | {"$"}


def reason(message: str, source: Any) -> str:
    """The first line of ``message``, with "..." for each word that ``source`` has too, and for
    signs that llguidance may have from there."""
    lines = [line.strip() for line in message.splitlines()] or [""]
    line = next((each for each in lines if each.startswith(_LINE_OF_A_REGEX_ERROR)), lines[0])
    if _TOO_COMPLEX.search(re.split("['\"`]", line)[0]):
        return "it has more rules, states or ways to read a text than the parser follows"
    # Escaped too: a message may quote "a\\nb", whose words are a and nb.
    texts = [*_texts(source), json.dumps(source, ensure_ascii=False)]
    private = {piece for text in texts for piece in _PIECE.findall(text)} - _OURS
    shown = _PIECE.sub(lambda found: "..." if _is_private(found[0], private) else found[0], line)
    return shown if len(shown) <= MOST_CHARS else f"{shown[: MOST_CHARS - 3]}..."


def _is_private(piece: str, private: set[str]) -> bool:
    if piece[0].isalnum() or piece[0] == "_":
        return piece in private
    sign = piece.strip(_AROUND)
    return sign in private or not set(sign) <= _MARKS or bool(_REPEATED.search(piece))


def _texts(value: Any) -> Iterator[str]:
    """All strings and numbers in ``value``, the keys of its objects included."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    else:
        yield str(value)
