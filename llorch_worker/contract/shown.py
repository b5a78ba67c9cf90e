"""Values that users and producers chose, as logs, events and terminals may show them."""

from __future__ import annotations

from collections.abc import Mapping

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
    """The type and size of ``value``; the value itself if it is a number or null."""
    match value:
        case None:
            return "null"
        case int() if value.bit_length() > 64:
            # Python refuses to print integers with thousands of digits.
            return f"an integer of {value.bit_length()} bits"
        case bool() | int() | float():
            return repr(value)
        case str():
            return f"a string of {len(value)} characters"
        case list() | tuple():
            return f"a list of {len(value)} items"
        case Mapping():
            return f"an object of {len(value)} fields"
        case _:
            return type(value).__name__
