"""The last hour of the fleet, drawn with blocks on axes with units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from llorch_worker.contract.quantities import human_ms

if TYPE_CHECKING:
    from llorch_worker.broker.figures.history import Point

SPAN_S = 3600
CHARTS_IN_ROW = 2
LINES_AROUND = 2
"""Of a chart: its title and its time axis."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LABEL_COLUMNS = 9
_GAP_S = 100
"""Points further apart are not joined: no gateway ran in between."""

Value = Callable[["Point"], float | None]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


_CHARTS: tuple[tuple[str, Value, Callable[[float], str]], ...] = (
    ("tokens/s", lambda point: point.tokens_per_s, _count),
    ("jobs that wait", lambda point: point.waiting, _count),
    ("first token p95", lambda point: point.first_token_p95_ms, human_ms),
    ("failed jobs a minute", lambda point: point.failures_per_min, _count),
)
ROWS = len(_CHARTS) // CHARTS_IN_ROW


def charts(points: Sequence[Point], now_s: float, columns: int, lines: int) -> Table:
    """All charts on ``lines`` lines, two beside each other, ``columns`` wide together."""
    height = lines // ROWS - LINES_AROUND
    # Of a terminal that is too narrow, rich cuts what is beyond its edge.
    width = max(_LABEL_COLUMNS + 2, columns // CHARTS_IN_ROW - 2)
    grid = Table.grid(padding=(0, 2, 0, 0))
    drawn = [
        _chart(title, unit, _slots(points, value, now_s, width - _LABEL_COLUMNS - 1), height)
        for title, value, unit in _CHARTS
    ]
    for first in range(0, len(drawn), CHARTS_IN_ROW):
        grid.add_row(*drawn[first : first + CHARTS_IN_ROW])
    return grid


def _slots(points: Sequence[Point], value: Value, now_s: float, columns: int) -> list[float | None]:
    """The greatest value in each column's time; None where there is none."""
    slot_s = SPAN_S / columns
    found: list[float | None] = [None] * columns
    for point in points:
        figure = value(point)
        # As long as the next point may take, so that narrow columns have no holes.
        begin = int((SPAN_S - (now_s - point.at)) / slot_s)
        for column in range(begin, begin + max(1, round(_GAP_S / 2 / slot_s))):
            if figure is not None and 0 <= column < columns:
                found[column] = max(found[column] or 0.0, figure)
    return found


def _chart(
    title: str, unit: Callable[[float], str], slots: Sequence[float | None], height: int
) -> Text:
    known = [value for value in slots if value is not None]
    most = max(known, default=0.0)
    last = f"  now {unit(known[-1])}" if known else "  nothing yet"
    chart = Text(no_wrap=True)
    chart.append(" " * _LABEL_COLUMNS + title).append(f"{last}\n", "dim")
    for row in range(height - 1, -1, -1):
        label = unit(most) if row == height - 1 and most else "0" if row == 0 else ""
        chart.append(f"{label:>{_LABEL_COLUMNS - 1}} ", "dim")
        chart.append("".join(_block(value, most, row, height) for value in slots) + "\n", "cyan")
    begin, end = "-60 min", "now"
    axis = f"{begin}{' ' * (len(slots) - len(begin) - len(end))}{end}"
    chart.append(" " * _LABEL_COLUMNS + axis, "dim")
    return chart


def _block(value: float | None, most: float, row: int, height: int) -> str:
    if value is None:
        return " "
    # A nought is seen, too: somebody looked.
    eighths = max(1, round(8 * height * value / most)) if most else 1
    return _BLOCKS[max(0, min(8, eighths - 8 * row))]
