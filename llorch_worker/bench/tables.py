"""Headings, remarks and tables of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rich.table import Table
from rich.text import Text

Cell: TypeAlias = str | float | Text | None


def title(text: str) -> Text:
    """The line that says what was measured."""
    return Text(text, "bold")


def remark(text: str) -> Text:
    """Something that could not be measured, or not as asked."""
    return Text(text, "yellow")


def table(
    columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell]], *, words: int = 1
) -> Table:
    """``columns``: titles, and how their numbers are formatted. The first ``words`` hold words.

    A column without any value, such as the spread of a single pass, is left out.
    """
    made = Table(box=None, header_style="dim", pad_edge=False)
    rows = list(rows)
    kept = [n for n in range(len(columns)) if n < words or any(row[n] is not None for row in rows)]
    for number in kept:
        made.add_column(columns[number][0], justify="left" if number < words else "right")
    for row in rows:
        made.add_row(*(shown(row[number], columns[number][1]) or "" for number in kept))
    return made


def shown(cell: Cell, form: str) -> str | Text | None:
    """A number as ``form`` says; anything else as it is."""
    return format(cell, form) if isinstance(cell, int | float) else cell


def median_of(passes: int) -> str:
    """``median of 3 passes``, or ``one pass``."""
    return "one pass" if passes == 1 else f"median of {passes} passes"
