"""Objects that kombu's JSON would read as something else.

kombu writes a date as ``{"__type__": "datetime", "__value__": ...}``, and reads every object of
these two names so, or fails. A user's object of these names gets a third one on its way through
Celery, with which it stays an object everywhere. Whoever knows the mark takes it off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPED = frozenset({"__type__", "__value__"})
MARK = "__plain__"
"""The third name. Its value is a list of what the user's object has under it: of nothing mostly."""
MOST_LEVELS = 100
"""No valid field nests deeper: those that do are refused as they are."""


def mark_plain(value: Any) -> Any:
    """JSON ``value``, with a mark on each object that kombu would take for one of its types."""
    if isinstance(value, list | tuple):
        return [mark_plain(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    marked = {name: mark_plain(each) for name, each in value.items()}
    if value.keys() - {MARK} == TYPED:
        marked[MARK] = [marked[MARK]] if MARK in marked else []
    return marked


def unmark_plain(value: Any, levels: int = MOST_LEVELS) -> Any:
    """``value`` as :func:`mark_plain` got it, to a depth of ``levels``."""
    if levels and isinstance(value, list):
        return [unmark_plain(each, levels - 1) for each in value]
    if not levels or not isinstance(value, dict):
        return value
    plain = {name: unmark_plain(each, levels - 1) for name, each in value.items()}
    if value.keys() == TYPED | {MARK} and isinstance(plain[MARK], list) and len(plain[MARK]) < 2:
        before = plain.pop(MARK)
        if before:
            plain[MARK] = before[0]
    return plain
