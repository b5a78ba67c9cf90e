"""JSON Schemas that a grammar can hold only in part: relaxed for it, checked on the whole text."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from llorch_worker.contract import ToolCall

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_UNHELD_WORDS = """
propertyNames uniqueItems contains minContains maxContains not if then else dependentRequired
dependentSchemas dependencies unevaluatedProperties unevaluatedItems
"""
_HELD_WORDS = """
type enum const properties patternProperties additionalProperties required minProperties
maxProperties items prefixItems additionalItems minItems maxItems minLength maxLength pattern format
minimum maximum exclusiveMinimum exclusiveMaximum multipleOf anyOf allOf oneOf
"""
_FORMAT_WORDS = "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown"
_UNHELD = frozenset(_UNHELD_WORDS.split())
"""Keywords that llguidance does not know."""
_KEYWORDS = _UNHELD | frozenset(_HELD_WORDS.split())
_FORMATS = frozenset(_FORMAT_WORDS.split())
"""Those that llguidance holds."""
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems", "contentSchema"),
)
_LIKE = 0.85
"""How alike a word and a keyword are if one is the other misspelt; below are words of their own."""


_MOST_WORDS = 500
_MOST_KEYS = 500
"""Of an object's patterns times its names: beyond, the search for dead ends takes too long."""
_LOOKS_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")
LENGTHS: Final = frozenset({"minLength", "maxLength"})
_MOST_CHARACTERS: Final = 2_000
"""Of all different limits of lengths together. For each character llguidance builds up to 9 lexer
states, of which a grammar may have 20,000: with more, a long text would fail in the middle."""


@dataclass(frozen=True)
class Relaxed:
    """``schema`` for the grammar, and the ``keywords`` of the user's that it does not hold."""

    schema: dict[str, Any]
    keywords: tuple[str, ...]


def relax(schema: Mapping[str, Any], longest: float | None = None) -> Relaxed:
    """What of ``schema`` a grammar can hold. ``longest``: see :func:`longest_held`, which by
    default looks at this schema alone."""
    keywords: dict[str, None] = {}
    relaxed = _relaxed(schema, keywords, longest_held([schema]) if longest is None else longest)
    return Relaxed(relaxed, tuple(keywords))


def longest_held(schemas: Iterable[Mapping[str, Any]]) -> float:
    """The highest ``minLength`` or ``maxLength`` that one grammar of ``schemas`` holds, so that all
    up to it fit the lexer. Texts with the same rules share their states."""
    rules: dict[str, float] = {}
    for each in (inner for schema in schemas for inner in _schemas(schema)):
        limits = [_length(each.get(name)) for name in LENGTHS]
        for limit in limits:
            if 0 < limit <= _MOST_CHARACTERS:
                rules[repr((limit, limits, each.get("pattern"), each.get("format")))] = limit
    longest = total = 0.0
    for length, alike in groupby(sorted(rules.values())):
        total += sum(alike)
        if total > _MOST_CHARACTERS:
            break
        longest = length
    return longest


def _length(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


def misspelt(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first word in the place of a keyword that is like one, and that keyword."""
    words = {word for each in _schemas(schema) for word in each} - _KEYWORDS
    # Annotations of OpenAPI and others begin like this.
    words = {word for word in words if not word.startswith(("x-", "$", "_"))}
    for word in sorted(words, key=lambda word: (len(word), word))[:_MOST_WORDS]:
        plain = word.replace("_", "").replace("-", "").lower()
        for keyword in sorted(_KEYWORDS):
            near = len(plain) > 5 and abs(len(word) - len(keyword)) <= 2
            if plain == keyword.lower() or (
                near and difflib.SequenceMatcher(None, word, keyword).ratio() >= _LIKE
            ):
                return word, keyword
    return None


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all within it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for name in _OF_SCHEMAS:
        if isinstance(each := schema.get(name), Mapping):
            for inner in each.values():
                yield from _schemas(inner)
    for name in _LISTS:
        if isinstance(each := schema.get(name), list):
            for inner in each:
                yield from _schemas(inner)
    for name in _SINGLE:
        yield from _schemas(schema.get(name))


def _relaxed(schema: Any, keywords: dict[str, None], longest: float) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _UNHELD:
            if not _says_nothing(schema, name, value):
                keywords[name] = None
        elif not _is_held(schema, name, value, longest):
            keywords[name] = None
        elif name in _OF_SCHEMAS and isinstance(value, Mapping):
            made[name] = {key: _relaxed(each, keywords, longest) for key, each in value.items()}
        elif name in _LISTS and isinstance(value, list):
            made[name] = [_relaxed(each, keywords, longest) for each in value]
            if name == "oneOf":
                keywords["oneOf"] = None
        elif name in _SINGLE:
            made[name] = _relaxed(value, keywords, longest)
        else:
            made[name] = value
    return _without_used_up_patterns(_without_patterns_that_look_around(made, keywords))


def _without_patterns_that_look_around(
    schema: dict[str, Any], keywords: dict[str, None]
) -> dict[str, Any]:
    """``schema`` in which a key that such a pattern may match is one of the additional ones."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict) or not any(map(_looks_around, patterns)):
        return schema
    keywords["patternProperties"] = None
    held = {pattern: value for pattern, value in patterns.items() if not _looks_around(pattern)}
    values = [value for pattern, value in patterns.items() if pattern not in held]
    values.append(schema.get("additionalProperties", True))
    return {**schema, "patternProperties": held, "additionalProperties": {"anyOf": values}}


def _is_held(schema: Mapping[str, Any], name: str, value: Any, longest: float) -> bool:
    match name:
        case "format":
            return isinstance(value, str) and value in _FORMATS
        case "minProperties" | "maxProperties":
            return _counts_alone(schema)
        case _ if name in LENGTHS:
            return _length(value) <= longest
        case "pattern":
            return not _looks_around(value)
    return True


def _looks_around(pattern: Any) -> bool:
    """Whether a pattern, such as zod's of an address, has what no lexer can do."""
    return isinstance(pattern, str) and _LOOKS_AROUND.search(pattern) is not None


def _says_nothing(schema: Mapping[str, Any], name: str, value: Any) -> bool:
    match name:
        case "uniqueItems":
            return value is False
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "then" | "else":
            return "if" not in schema
        case "unevaluatedProperties" | "unevaluatedItems":
            return value is True
    return False


def _counts_alone(schema: Mapping[str, Any]) -> bool:
    """Whether the number of properties is that of the optional keys, which llguidance can count."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    return all(name in required for name in properties)


def _without_used_up_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` without patterns of keys that match only keys which it names.

    llguidance would offer another key after those, and then find none.
    """
    patterns, named = schema.get("patternProperties"), schema.get("properties", {})
    required = schema.get("required", [])
    if not (
        schema.get("additionalProperties") is False
        and isinstance(patterns, dict)
        and isinstance(named, dict)
        and isinstance(required, list)
        and len(patterns) * (len(named) + len(required)) <= _MOST_KEYS
    ):
        return schema
    left, properties = {}, dict(named)
    for pattern, value in patterns.items():
        names = [name for name in {*named, *required} if isinstance(name, str)]
        own = []
        if _is_finite(pattern):
            own = [name for name in names if _fits({"type": "string", "pattern": pattern}, name)]
        if not own or not _has_no_other(pattern, own):
            left[pattern] = value
            continue
        for name in own:
            properties[name] = {"allOf": [named[name], value]} if name in named else value
    return {**schema, "properties": properties, "patternProperties": left}


def _fits(schema: Mapping[str, Any], value: Any) -> bool:
    from llguidance import LLMatcher

    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_json_schema(dict(schema)), log_level=0)
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return matcher.consume_tokens(list(text)) and matcher.is_accepting()


def _is_finite(pattern: str) -> bool:
    """Whether a pattern may match a few texts only. One with an open end, or that repeats, has
    always more; others with characters of rare meaning are not worth reading."""
    anchored = pattern.startswith("^") and pattern.endswith("$")
    return anchored and not re.search(r"[|\\^$*+]", pattern[1:-1])


def _has_no_other(pattern: str, texts: Collection[str]) -> bool:
    """Whether a finite pattern matches nothing but ``texts``."""
    from llguidance import LLMatcher

    inner = pattern[1:-1]
    known = " | ".join(map(json.dumps, texts))
    lark = f"start: T\nT: /{inner.replace('/', chr(92) + '/')}/ & ~({known})"
    matcher = LLMatcher(_bytes(), lark, log_level=0)
    if matcher.is_error():
        return False
    matcher.compute_bitmask()
    return matcher.is_error()


@cache
def _bytes() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


@dataclass(frozen=True, slots=True)
class Checks:
    """What the finished text, or the arguments of its calls, must meet beyond the grammar."""

    text: Mapping[str, Any] | None
    arguments: Mapping[str, Mapping[str, Any]]
    """The schema of each function's."""

    def check_schemas(self) -> None:
        """Raises ValueError for a schema that is none, or cannot be checked here."""
        from llorch_worker.intake.constraints.schema_check import validator

        for schema in (*([] if self.text is None else [self.text]), *self.arguments.values()):
            validator(schema)

    def unmet(self, answers: Iterable[tuple[str, Collection[ToolCall]]]) -> list[tuple[str, ...]]:
        """For each text and its calls the place and the keyword of each rule that is broken."""
        from llorch_worker.intake.constraints.schema_check import broken

        of_answers = [list(self._due(*answer)) for answer in answers]
        pairs = [(schema, checked) for due in of_answers for _, schema, checked in due]
        found = iter(broken(pairs) if pairs else ())
        return [
            tuple(place + rule for place, _, _ in due for rule in next(found)) for due in of_answers
        ]

    def _due(
        self, written: str, calls: Collection[ToolCall]
    ) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        """Places, schemas, and the texts to check by them."""
        if self.text is not None and not calls:
            yield "", self.text, written
        for index, call in enumerate(calls):
            if (schema := self.arguments.get(call.function.name)) is not None:
                yield f"tool_calls.{index}", schema, call.function.arguments
