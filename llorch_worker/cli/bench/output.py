"""The output of benchmarks: a JSON document, or provenance, headings and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, Union

from llorch_worker.cli.terminal.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from llorch_worker.bench.instruments.provenance import Figures

Shown = TypeVar("Shown", bound="Figures")
Cell: TypeAlias = Union[str, float, "Text", None]


def print_figures(
    screen: Screen, figures: Shown, lay_out: Callable[[Shown], Iterable[RenderableType]]
) -> None:
    """Print the figures as JSON, or their provenance and the layout that ``lay_out`` yields."""
    from rich.text import Text

    if screen.as_json:
        screen.document(figures.model_dump(mode="json"))
        return
    for line in figures.provenance.lines():
        screen.out.print(Text(line, "dim"), soft_wrap=True)
    screen.out.print()
    for part in lay_out(figures):
        screen.out.print(Text(part) if isinstance(part, str) else part)


def title(text: str) -> Text:
    """The line that says what was measured."""
    from rich.text import Text

    return Text(text, "bold")


def remark(text: str) -> Text:
    """A line about something that could not be measured, or not as requested."""
    from rich.text import Text

    return Text(text, "yellow")


def table(
    columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell]], *, words: int = 1
) -> Table:
    """``columns``: titles and number formats. The first ``words`` columns hold words.

    A column without any value, such as the spread of a single pass, is left out.
    """
    from rich.table import Table

    made = Table(box=None, header_style="dim", pad_edge=False)
    rows = list(rows)
    kept = [n for n in range(len(columns)) if n < words or any(row[n] is not None for row in rows)]
    for number in kept:
        made.add_column(columns[number][0], justify="left" if number < words else "right")
    for row in rows:
        made.add_row(*(shown(row[number], columns[number][1]) or "" for number in kept))
    return made


def shown(cell: Cell, form: str) -> str | Text | None:
    """A number in the format ``form``; any other value unchanged."""
    return format(cell, form) if isinstance(cell, int | float) else cell


def median_of(passes: int) -> str:
    """``median of 3 passes``, or ``one pass``."""
    return "one pass" if passes == 1 else f"median of {passes} passes"
