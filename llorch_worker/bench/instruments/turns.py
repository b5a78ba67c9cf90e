"""Two sides of a comparison, measured by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Work = TypeVar("Work")
Ours = TypeVar("Ours")
Theirs = TypeVar("Theirs")


def by_turns(
    ours: Callable[[Work], Ours], theirs: Callable[[Work], Theirs], works: Iterable[Work]
) -> list[tuple[Ours, Theirs]]:
    """What the two made of each of ``works``. Each time the other is first: what slows the machine
    meets both."""
    pairs = []
    for number, work in enumerate(works):
        if number % 2 == 0:
            mine = ours(work)
            pairs.append((mine, theirs(work)))
        else:
            their = theirs(work)
            pairs.append((ours(work), their))
    return pairs
