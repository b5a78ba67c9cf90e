"""How much a document may hold.

Every wrong value costs a fault of its own, about 50 microseconds and 2 kB, before the first of them
are reported. So a body of 8 MB could hold up a gateway for minutes.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticCustomError

MOST_VALUES = 50_000
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
        raise PydanticCustomError(
            kind, "must be at most {limit} bytes as JSON", {"limit": most_bytes}
        )
    return value
