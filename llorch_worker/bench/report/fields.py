"""Values deep in a JSON document, by dotted path; what is missing or of another type is None."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def at(document: Any, path: str) -> Any:
    """``at(row, "first_token_ms.p50")``."""
    for name in path.split("."):
        if not isinstance(document, dict):
            return None
        document = document.get(name)
    return document


def number(document: Any, path: str) -> float | None:
    value = at(document, path)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def text(document: Any, path: str) -> str:
    """Empty where there is none."""
    value = at(document, path)
    return "" if value is None or isinstance(value, dict | list) else str(value)


def rows(document: Any, path: str) -> Iterator[dict[str, Any]]:
    """The objects of a list."""
    value = at(document, path)
    for each in value if isinstance(value, list) else ():
        if isinstance(each, dict):
            yield each


def texts(document: Any, path: str) -> tuple[str, ...]:
    """The strings of a list."""
    value = at(document, path)
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()
