"""How much a document may hold.

Every wrong value costs a fault of its own, about 50 microseconds and 2 kB, before the first of them
are reported. So a body of 8 MB could hold up a gateway for minutes.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import (
    ErrorDetails,
    PydanticCustomError,
    PydanticSerializationError,
    ValidationError,
    from_json,
    to_json,
)

MOST_VALUES = 50_000
MOST_LISTS = 100_000
"""Objects and lists of a document, also in fields that few values does not look into."""
MOST_TEXTS = 100_000
"""Names and texts of a document, as above."""
MOST_NAMES = 50_000
"""Names of a document, as above. In one object, each costs more than the last."""
MOST_ITEMS = 1_100_000
"""Values of a document, as above: the longest prompt of token ids, and all others."""
MOST_BROKEN = 1_000
"""Broken rules of a document that are looked at, each for 10 microseconds."""
_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHECKED_AS_ONE = frozenset(
    {
        "prompt",
        "prompt_token_ids",
        "tokens",
        "schema",
        "parameters",
        "json",
        "metadata",
        "chat_template_kwargs",
    }
)
"""Fields of which at most one fault is reported, however much they hold."""


class UnreadableJson(ValueError):
    """A text that is not read, and the rule that it breaks."""


def read_json(content: bytes) -> Any:
    """``content`` as JSON in UTF-8.

    Python's parser makes 8 MB of empty lists in 0.7 s, and lets no other thread run meanwhile. So
    what a document holds is counted in its bytes before any of it is made.

    Raises:
        UnreadableJson: it is no JSON, or holds too much.
    """
    content = content.removeprefix(_BYTE_ORDER_MARK)
    bound_json(content)
    try:
        return from_json(content)
    except ValueError as error:
        if _HALF_A_PAIR.search(content) and _separators(content) <= MOST_LISTS:
            # Who reads the field refuses it by its name.
            with suppress(ValueError, RecursionError):
                return json.loads(content)
        if b"\0" in content[:4] or not _is_utf8(content):
            raise UnreadableJson("must be JSON in UTF-8") from None
        raise UnreadableJson(f"must be JSON ({error})") from None


@dataclass(frozen=True)
class JsonBounds:
    """The most that JSON may hold, by kind."""

    texts: int
    """Names included."""
    names: int
    lists: int
    """And objects."""
    items: int
    """Values, but for the first of an object or list that is no object or list itself."""


DOCUMENT: Final = JsonBounds(texts=MOST_TEXTS, names=MOST_NAMES, lists=MOST_LISTS, items=MOST_ITEMS)


@dataclass(frozen=True)
class Excess:
    """What JSON holds too much of."""

    count: int
    most: int
    what: str


def bound_json(content: bytes) -> None:
    """Raises ``UnreadableJson`` if the JSON ``content`` is more than a document may hold."""
    if (excess := excess_of(content, DOCUMENT)) is not None:
        raise UnreadableJson(f"must hold at most {excess.most} {excess.what}")


def excess_of(content: bytes, most: JsonBounds) -> Excess | None:
    """What the JSON ``content`` holds more of than ``most``, if anything, counted in its bytes.

    What follows its first mistake may be miscounted; a parser stops there.
    """
    if _separators(content) <= min(most.names, most.lists):
        return None
    bare = content
    if b"\\" in content:
        bare = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    lists = items = names = 0
    texts = bare.count(b'"') // 2
    if texts <= most.texts:
        # Every other piece is outside of texts, which may hold any number of commas.
        outside = b"".join(bare.split(b'"')[::2])
        lists = outside.count(b"[") + outside.count(b"{")
        items = outside.count(b",") + lists
        names = outside.count(b":")
    for excess in (
        Excess(texts, most.texts, "names and texts"),
        Excess(names, most.names, "names"),
        Excess(lists, most.lists, "objects and lists"),
        Excess(items, most.items, "values"),
    ):
        if excess.count > excess.most:
            return excess
    return None


def _separators(content: bytes) -> int:
    return sum(map(content.count, (b",", b"[", b"{")))


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def broken_rules(error: ValidationError) -> list[ErrorDetails]:
    """What pydantic found in a document; of very many mistakes, only how many there are."""
    count = error.error_count()
    if count <= MOST_BROKEN:
        return error.errors(include_url=False)
    rule = f"breaks {count} rules; only up to {MOST_BROKEN} are listed"
    return [ErrorDetails(type="values", loc=(), msg=rule, input=count)]


def few_values(document: Any) -> Any:
    """``document``, if it is no larger than it needs to be. Raises ``PydanticCustomError``."""
    count = 0
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            inner = [each for name, each in value.items() if name not in _CHECKED_AS_ONE]
            count += len(value)
        elif isinstance(value, list | tuple):
            inner = list(value) if count + len(value) <= MOST_VALUES else []
            count += len(value)
        else:
            continue
        if count > MOST_VALUES:
            raise PydanticCustomError(
                "values", "must hold at most {limit} values", {"limit": MOST_VALUES}
            )
        waiting += inner
    return document


def nests_deeper(value: object, levels: int) -> bool:
    """Whether ``value`` nests objects and lists deeper than ``levels``."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(nests_deeper(item, levels - 1) for item in value)


def small_json(
    value: dict[str, Any], kind: str, *, most_levels: int, most_bytes: int
) -> dict[str, Any]:
    """``value``, if it is JSON of at most this depth and size.

    Raises ``PydanticCustomError`` of the type ``kind``.
    """
    too_large = PydanticCustomError(
        kind, "must be at most {limit} bytes as JSON", {"limit": most_bytes}
    )
    # Measured in one pass of compiled code, before anything walks the values.
    if _least_bytes(value) > most_bytes:
        raise too_large
    if nests_deeper(value, most_levels):
        # Deeper JSON can be read, but not written again.
        raise PydanticCustomError(
            kind, "must nest at most {limit} levels deep", {"limit": most_levels}
        )
    try:
        # JSON can escape half a character, which UTF-8 cannot encode.
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError) as error:
        raise PydanticCustomError(kind, "must be plain JSON") from error
    if size > most_bytes:
        raise too_large
    return value


def _least_bytes(value: object) -> int:
    """The size of ``value`` as JSON without spaces; 0 for what is no JSON."""
    try:
        return len(to_json(value, inf_nan_mode="constants"))
    except (PydanticSerializationError, ValueError):
        return 0
