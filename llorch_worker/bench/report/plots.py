"""Readings to inline SVG by matplotlib, in colours that a light and a dark page both show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from llorch_worker.bench.report.numbers import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#4a90d9", "#e08a3c", "#3fa37c", "#c25b96", "#8d7bd8", "#a3913a")
"""Of middle brightness; runs beyond the sixth begin again."""
LOG_FROM: Final = 100.0
"""Largest over smallest value from which a linear axis would hide the small ones."""
WIDTH_IN: Final = 6.2
BAR_IN: Final = 0.21
_INK = "#010203"
"""Stands for the page's own text colour, which only the page knows."""
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "llorch",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


@dataclass(frozen=True)
class Bars:
    """One metric: a value for each category, of each run; None where a run has none."""

    title: str
    unit: str
    categories: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    """By run, then by category."""
    wide: bool
    """Whether the axis may be logarithmic."""


@dataclass(frozen=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Lines:
    """One metric over what the load is large in."""

    title: str
    unit: str
    x_title: str
    lines: tuple[Line, ...]


def bars_svg(bars: Bars) -> str:
    """Horizontal bars, the first category on top; a colour for each run, in the page's order."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    runs, count = len(bars.values), len(bars.categories)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.55 + count * (runs * BAR_IN + 0.1)))
        axes = figure.add_subplot()
        height = 0.8 / runs
        for number, values in enumerate(bars.values):
            places = [place + (number - (runs - 1) / 2) * height for place in range(count)]
            drawn = axes.barh(
                places,
                [value or 0 for value in values],
                height * 0.94,
                color=COLOURS[number % len(COLOURS)],
            )
            labels = ["" if value is None else shown(value) for value in values]
            axes.bar_label(drawn, labels, padding=3, fontsize=8)
        axes.set_yticks(range(count), bars.categories)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(count - 0.4, -0.6)
        _scale(axes, bars)
        axes.margins(x=0.14)
        axes.grid(axis="x")
        axes.set_xlabel(bars.unit)
        return _svg(figure, f"{bars.title}, {bars.unit}")


def lines_svg(plot: Lines) -> str:
    """From 0 on, over a logarithmic axis: what costs the same at any load is a flat line."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 3.2))
        axes = figure.add_subplot()
        for number, line in enumerate(plot.lines):
            x, y = zip(*line.points, strict=True)
            axes.plot(x, y, "o-", color=COLOURS[number % len(COLOURS)], label=line.label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for line in plot.lines for x, _ in line.points}))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        axes.grid()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_xlabel(plot.x_title)
        axes.set_ylabel(plot.unit)
        # What grows linearly is a level line of rates near the top: there is room below it.
        axes.legend(frameon=False, fontsize=8, loc="lower left")
        return _svg(figure, f"{plot.title}, {plot.unit}, over {plot.x_title}")


def _scale(axes: Axes, bars: Bars) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:,g}")
    positive = [value for values in bars.values for value in values if value]
    if bars.wide and positive and min(positive) > 0 and max(positive) / min(positive) > LOG_FROM:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(left=min(positive) / 2)
    axes.xaxis.set_major_formatter(plain)


def _svg(figure: Figure, label: str) -> str:
    """The bare element, with no size of its own and no names that another plot may have too."""
    written = StringIO()
    metadata: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(
        written, format="svg", bbox_inches="tight", pad_inches=0.05, transparent=True,
        metadata=metadata,
    )  # fmt: skip
    text = written.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    used = set(re.findall(r"#([\w-]+)", text))
    text = re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r'<svg width="[^"]*" height="[^"]*"|<svg height="[^"]*" ', "<svg ", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def legend_colours(runs: Sequence[object]) -> list[str]:
    """The colour of each run's bars."""
    return [COLOURS[number % len(COLOURS)] for number in range(len(runs))]
