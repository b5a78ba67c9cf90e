"""Which sequences share a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def in_groups(contexts: Sequence[int], fits: Callable[[int, int], bool]) -> list[slice]:
    """Neighbours in groups as large as ``fits(count, longest context)`` allows; one that fits with
    nobody is alone."""
    groups, first, longest = [], 0, 0
    for at, context in enumerate(contexts):
        longest = max(longest, context)
        if at > first and not fits(at + 1 - first, longest):
            groups.append(slice(first, at))
            first, longest = at, context
    groups.append(slice(first, len(contexts)))
    return groups
