"""Two sides of a comparison, measured alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Work = TypeVar("Work")
Ours = TypeVar("Ours")
Theirs = TypeVar("Theirs")


def alternate(
    ours: Callable[[Work], Ours], theirs: Callable[[Work], Theirs], works: Iterable[Work]
) -> list[tuple[Ours, Theirs]]:
    """Give each of ``works`` to both sides. The side that goes first alternates, so that anything
    that slows the machine affects both."""
    pairs = []
    for number, work in enumerate(works):
        if number % 2 == 0:
            mine = ours(work)
            pairs.append((mine, theirs(work)))
        else:
            their = theirs(work)
            pairs.append((ours(work), their))
    return pairs
