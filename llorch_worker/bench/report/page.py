"""Runs to one HTML page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Final

from llorch_worker.bench.report.numbers import gain, shown
from llorch_worker.bench.report.plots import (
    Bars,
    Line,
    Lines,
    bars_svg,
    legend_colours,
    lines_svg,
)
from llorch_worker.bench.report.readings import Metric, Run

TITLES: Final = {
    "engine": "The engine",
    "overhead": "Outside the model",
    "profile": "Where a step's time goes",
    "queue": "Through the queue",
    "scaling": "Over the size of the load",
    "startup": "Until a model is ready",
    "peers": "Beside its peers",
    "components": "The parts one by one",
}
"""In the page's order."""
_STYLE = Path(__file__).with_name("page.css")


def page(runs: Sequence[Run], made: datetime) -> str:
    """``runs`` of one kind and load are compared, the first of them being what others are
    measured by."""
    order = list(TITLES)
    runs = sorted(runs, key=lambda run: order.index(run.kind))  # stable: else as they were given
    kinds = [(kind, list(members)) for kind, members in groupby(runs, lambda run: run.kind)]
    links = "".join(f'<a href="#{kind}">{TITLES[kind]}</a>' for kind, _ in kinds)
    body = "\n".join(part for kind, members in kinds for part in _section(kind, members))
    style = _STYLE.read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>llorch: measured</title>
<style>
{style}</style>
</head>
<body>
<h1>llorch: measured</h1>
<p class="faint">{len(runs)} saved runs, put together on {made:%Y-%m-%d %H:%M}. Ratios are to the
first run of a section; more than 10% better or worse is set in colour.</p>
<nav>{links}</nav>
{body}
</body>
</html>
"""


def _section(kind: str, runs: list[Run]) -> Iterator[str]:
    yield f'<h2 id="{kind}">{TITLES[kind]}</h2>'
    growth = _growth(runs)
    for title, cards in growth.items():
        yield f'<p class="load">over {escape(title)}</p>'
        yield _cards(cards)
    for load in dict.fromkeys(run.load for run in runs):
        compared = [run for run in runs if run.load == load]
        if load:
            yield f'<p class="load">{escape(load)}</p>'
        yield _legend(compared)
        metrics = dict.fromkeys(metric for run in compared for metric in run.metrics)
        shown_here = _cards(_card(metric, compared) for metric in metrics)
        if growth and len(compared) == 1 and len(runs) > 1:
            # What only lends its points to the plots above need not fill the page.
            shown_here = f"<details><summary>its figures</summary>\n{shown_here}</details>"
        yield shown_here


def _cards(cards: Iterable[str]) -> str:
    return '<div class="cards">\n' + "\n".join(cards) + "\n</div>"


def _legend(runs: list[Run]) -> str:
    items = []
    for run, letter, colour in zip(runs, _letters(runs), legend_colours(runs), strict=True):
        swatch = f'<span class="swatch" style="background: {colour}"></span>'
        subject = f" <span class=faint>{escape(run.subject)}</span>" if run.subject else ""
        name = f"{letter} = {run.path.name}" if letter else run.path.name
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in run.notes)
        lines = escape("\n".join(run.origin))
        items.append(f"<li>{swatch}{escape(name)}{subject}<pre>{lines}</pre>{notes}</li>")
    return '<ul class="runs">\n' + "\n".join(items) + "\n</ul>"


def _letters(runs: Sequence[Run]) -> list[str]:
    """A, B, C ... where there is more than one."""
    return [""] if len(runs) == 1 else [_letter(number) for number in range(len(runs))]


def _letter(number: int) -> str:
    """A to Z, then A1 to Z1 and so on."""
    turn, place = divmod(number, 26)
    return chr(ord("A") + place) + (str(turn) if turn else "")


def _card(metric: Metric, runs: list[Run]) -> str:
    by_run = [
        {each.category: each.value for each in run.readings if each.metric == metric}
        for run in runs
    ]
    categories = tuple(dict.fromkeys(category for values in by_run for category in values))
    bars = Bars(
        title=metric.title,
        unit=metric.unit,
        categories=categories,
        values=tuple(tuple(values.get(name) for name in categories) for values in by_run),
        wide=metric.wide,
    )
    return (
        f'<div class="card"><h3>{escape(metric.title)} <small>{escape(metric.unit)}</small></h3>\n'
        f"{bars_svg(bars)}\n{_table(metric, bars, _letters(runs))}</div>"
    )


def _table(metric: Metric, bars: Bars, letters: list[str]) -> str:
    first = letters[0]
    titles = ["", *(letter or metric.unit for letter in letters)]
    titles += [f"{letter} / {first}" for letter in letters[1:]]
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    rows = []
    for place, category in enumerate(bars.categories):
        values = [of_run[place] for of_run in bars.values]
        cells = [f"<td>{'–' if value is None else shown(value)}</td>" for value in values]
        cells += [_ratio(metric, values[0], value) for value in values[1:]]
        rows.append(f"<tr><td>{escape(category)}</td>{''.join(cells)}</tr>")
    return (
        f'<div class="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _ratio(metric: Metric, first: float | None, value: float | None) -> str:
    if not first or value is None:
        return "<td>–</td>"
    kind = gain(value / first, metric.better)
    style = f' class="{kind}"' if kind else ""
    return f"<td{style}>{value / first:.2f}</td>"


def _growth(runs: list[Run]) -> dict[str, list[str]]:
    """For each measure of a load's size in which the runs differ: a plot of each rate over it."""
    lines: dict[tuple[str, Metric], dict[str, dict[float, float]]] = {}
    for run in runs:
        for reading in run.readings:
            place = reading.place
            if place is not None and reading.metric.unit.endswith("/s"):
                label = ", ".join(filter(None, (run.subject, place.series)))
                of_plot = lines.setdefault((place.title, reading.metric), {})
                of_plot.setdefault(label, {}).setdefault(place.x, reading.value)
    cards: dict[str, list[str]] = {}
    for (title, metric), by_label in lines.items():
        grown = tuple(
            Line(label, tuple(sorted(points.items())))
            for label, points in by_label.items()
            if len(points) > 1
        )
        if grown:
            plot = Lines(metric.title, metric.unit, title, grown)
            cards.setdefault(title, []).append(
                f'<div class="card"><h3>{escape(metric.title)} '
                f"<small>{escape(metric.unit)}</small></h3>\n{lines_svg(plot)}\n"
                f"{_points(grown, title)}</div>"
            )
    return cards


def _points(lines: tuple[Line, ...], title: str) -> str:
    places = sorted({x for line in lines for x, _ in line.points})
    head = "".join(f"<th>{place:,.0f}</th>" for place in places)
    rows = []
    for line in lines:
        values = dict(line.points)
        cells = "".join(
            f"<td>{shown(values[place]) if place in values else '–'}</td>" for place in places
        )
        rows.append(f"<tr><td>{escape(line.label)}</td>{cells}</tr>")
    return (
        f'<div class="table"><table><thead><tr><th>{escape(title)}</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
