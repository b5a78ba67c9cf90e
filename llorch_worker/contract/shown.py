"""Values that users and producers chose, as logs, events and terminals may show them."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from datetime import date, datetime, time
from decimal import Decimal
from uuid import UUID

MAX_SHOWN_CHARS = 80


def shown(value: object, most_chars: int = MAX_SHOWN_CHARS) -> str:
    """One printable line of at most ``most_chars``: a string, escaped and cut; otherwise what
    :func:`describe` says of the value."""
    if not isinstance(value, str):
        return describe(value)
    line = printable(value[: most_chars + 1])
    return line if len(line) <= most_chars else f"{line[: most_chars - 3]}..."


def printable(text: str) -> str:
    """``text`` with escapes in place of newlines, control characters and other invisible ones,
    which could forge log lines or control a terminal."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def describe(value: object) -> str:
    """The type and size of ``value``; the value itself if it is a number or null.

    kombu makes more than JSON's types of a stock producer's message.
    """
    match value:
        case None:
            return "null"
        case int() if value.bit_length() > 64:
            # Python refuses to print integers with thousands of digits.
            return f"an integer of {value.bit_length()} bits"
        case bool() | int() | float():
            return repr(value)
        case str():
            return f"a string of {_sized(value, 'character')}"
        case list() | tuple():
            return f"a list of {_sized(value, 'item')}"
        case Mapping():
            return f"an object of {_sized(value, 'field')}"
        case bytes():
            return _sized(value, "byte")
        case datetime() | date() | time():
            return "a date or time"
        case Decimal():
            return "a decimal"
        case UUID():
            return "a UUID"
        case _:
            return "a value that JSON does not have"


def _sized(value: Sized, noun: str) -> str:
    return f"{len(value)} {noun}" if len(value) == 1 else f"{len(value)} {noun}s"
