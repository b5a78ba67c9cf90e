"""How many values a document may hold.

Every wrong value costs a fault of its own, about 50 microseconds and 2 kB, before the first of them
are told. So a body of 8 MB could hold up a gateway for minutes.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

MOST_VALUES = 50_000
_CHECKED_AS_ONE = frozenset(
    {"prompt", "prompt_token_ids", "tokens", "schema", "parameters", "json", "metadata"}
)
"""Fields of which at most one fault is told, however much they hold."""


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
