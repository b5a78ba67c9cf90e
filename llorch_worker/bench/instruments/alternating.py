"""Two sides of a comparison, measured alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Work = TypeVar("Work")
Ours = TypeVar("Ours")
Theirs = TypeVar("Theirs")


def alternate(
    ours: Callable[[Work], Ours], theirs: Callable[[Work], Theirs], works: Iterable[Work]
) -> Iterator[tuple[Ours, Theirs]]:
    """Give each of ``works`` to both sides, as its pair is asked for. The side that goes first
    alternates, so that anything that slows the machine affects both."""
    for number, work in enumerate(works):
        if number % 2 == 0:
            mine = ours(work)
            yield mine, theirs(work)
        else:
            their = theirs(work)
            yield ours(work), their
