"""``llorch bench report``: saved runs on one HTML page, drawn by plotly."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from llorch_worker.bench.instruments.provenance import Provenance

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
pre { color: #666; white-space: pre-wrap } td + td { text-align: right; padding-left: 2rem }
"""


class Part(NamedTuple):
    """Rows of a document, named by some of their fields; each figure becomes a plot and a table."""

    path: str
    names: tuple[str, ...]
    figures: tuple[str, ...]


_LOAD = ("concurrency", "prompt_tokens", "new_tokens")
_RATES = ("prefill_tokens_per_s", "decode_tokens_per_s")
_LATENCIES = ("first_token_ms.p50", "first_token_ms.p99", "between_tokens_ms.p50")
_SHARES = ("decode_read_share", "prefill_flops_share", "outside_model_share")
_OVERHEAD = ("outside_model_mean_ms", "outside_model_ms.p50", "share")
_QUEUE_RATES = ("straight.tokens_per_s", "queued.tokens_per_s")
_QUEUE = ("share", "beside_model", *_QUEUE_RATES, "delivery_ms.p50")
_NO_OP = ("ratio", "ours.run_per_s", "stock.run_per_s", "ours_alone_ms.p50", "stock_alone_ms.p50")
_STARTUP = ("ready.median_s", "read.median_s", "write.median_s", "ratio")
_PEERS = ("ratio", "ours.tokens_per_s", "theirs.tokens_per_s")
KINDS: Final = {
    "engine": (Part("rows", _LOAD, (*_RATES, "total_tokens_per_s", *_LATENCIES, *_SHARES)),),
    "overhead": (Part("rows", ("model", "vocab_size", "sampling"), _OVERHEAD),),
    "profile": (Part("phases.components", ("phase", "component"), ("share", "ms_per_step")),),
    "queue": (
        Part("rows", ("jobs", "concurrency"), _QUEUE),
        Part("single", ("concurrency",), ("added_p50_ms", "added_p95_ms")),
        Part("no_op", ("jobs", "concurrency"), _NO_OP),
    ),
    "startup": (Part("", ("dtype", "max_sequences", "max_context"), _STARTUP),),
    "scaling": (
        Part("queued", ("queued", *_LOAD), ("tokens_per_s",)),
        Part("contexts", ("context_tokens",), _RATES),
    ),
    "peers": (Part("rows", ("kind", "peer", "sequences", "prompt_tokens", "jobs"), _PEERS),),
    "components": (Part("benchmarks", ("name",), ("stats.median",)),),
}
"""Keyed by the command that saved the document; ``components`` are pytest-benchmark's files."""


class NotARun(Exception):
    """The file holds no run to show; the message says why."""


@dataclass(frozen=True)
class Run:
    """One saved run. ``origin``: command, machine, versions and remarks; ``figures``: values by
    plot title and row name."""

    path: Path
    kind: str
    origin: tuple[str, ...]
    figures: dict[str, dict[str, float]]


def read_run(path: Path) -> Run:
    """Raises :class:`NotARun` for a file that cannot be read or holds no figures."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotARun(error.strerror or str(error)) from None
    except ValueError:
        raise NotARun("it is not JSON") from None
    kind, origin = _kind(document)
    figures: dict[str, dict[str, float]] = {}
    for part in KINDS[kind]:
        for row in _rows(document, part.path):
            label = ", ".join(_words(name, row[name]) for name in part.names if row.get(name))
            for figure in part.figures:
                value = _at(row, figure)
                if isinstance(value, int | float):
                    title = re.sub("[_.]", " ", f"{part.path} {figure}".replace("_per_s", "/s"))
                    figures.setdefault(title.strip(), {})[label] = value
    if not figures:
        raise NotARun(f"it holds no figures of {kind}")
    return Run(path, kind, (*origin, *_remarks(document)), figures)


def page(runs: Sequence[Run], made: datetime) -> str:
    """One self-contained page. Ratios are to the first run of a kind."""
    from plotly.offline import get_plotlyjs

    sections = []
    for kind in dict.fromkeys(run.kind for run in runs):
        members = [run for run in runs if run.kind == kind]
        sections.append(f"<h2>{kind}</h2>")
        for run in members:
            origin = escape("\n".join(run.origin))
            sections.append(f"<b>{escape(str(run.path))}</b><pre>{origin}</pre>")
        titles = dict.fromkeys(title for run in members for title in run.figures)
        sections += [_plot(title, members) for title in titles]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>llorch bench</title>'
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script><h1>llorch bench</h1>"
        f"<p>{len(runs)} saved runs; page made {made:%Y-%m-%d %H:%M}.</p>" + "\n".join(sections)
    )


def _plot(title: str, runs: Sequence[Run]) -> str:
    """Bars in one colour per run, and a table of the same values."""
    from plotly.graph_objects import Bar, Figure

    columns = {f"{run.path}": run.figures[title] for run in runs if title in run.figures}
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    figure = Figure(
        [Bar(name=n, x=list(c.values()), y=list(c), orientation="h") for n, c in columns.items()],
        {"title": {"text": title}, "height": 180 + 26 * len(rows) * len(columns)},
    )
    figure.update_yaxes(autorange="reversed", type="category", automargin=True)
    values = [value for column in columns.values() for value in column.values()]
    if 0 < 100 * min(values) < max(values):  # a linear axis would hide the small bars
        figure.update_xaxes(type="log")
    (base, first), *others = columns.items()
    lines = [[title, *columns, *(f"{name} / {base}" for name, _ in others)]]
    for row in rows:
        shown = [_shown(column.get(row)) for column in columns.values()]
        ratios = [_shown(column.get(row), first.get(row)) for _, column in others]
        lines.append([row, *shown, *ratios])
    table = "".join("<tr><td>" + "<td>".join(map(escape, line)) for line in lines)
    return f"{figure.to_html(include_plotlyjs=False, full_html=False)}<table>{table}</table>"


def _shown(value: float | None, base: float | None = 1) -> str:
    if value is None or not base:
        return "–"
    return f"{value / base:,.0f}" if abs(value / base) >= 1000 else f"{value / base:.4g}"


def _kind(document: Any) -> tuple[str, list[str]]:
    """The kind of run, and its provenance."""
    if _at(document, "benchmarks"):
        known = ("datetime", "machine_info.cpu.brand_raw", "commit_info.id", "version")
        return "components", [f"{name}: {_at(document, name)}" for name in known]
    try:
        origin = Provenance.model_validate(_at(document, "provenance"))
        words = shlex.split(origin.command)
    except ValueError:  # from pydantic or shlex
        raise NotARun("it does not say which command of llorch bench saved it") from None
    kind = words[2].removeprefix("benches.") if len(words) > 2 else ""
    if kind not in KINDS:
        raise NotARun(f"{origin.command[:80]} has no plots; allowed: {', '.join(KINDS)}")
    return kind, origin.lines()


def _remarks(document: dict[str, Any]) -> Iterator[str]:
    for row in (document, *_rows(document, "rows")):
        where = [_words(n, row[n]) for n in ("concurrency", "peer") if "kind" in row and n in row]
        notes = row.get("notes") or ()
        notes = [f"{k}: {v}" for k, v in notes.items()] if isinstance(notes, dict) else notes
        for remark in (*notes, *filter(None, [row.get("reason")])):
            yield ": ".join([*where, str(remark)])


def _rows(value: Any, path: str) -> Iterator[dict[str, Any]]:
    """The objects at ``path``, each with the plain fields of its enclosing objects."""
    if isinstance(value, list):
        for each in value:
            yield from _rows(each, path)
    elif isinstance(value, dict):
        name, _, rest = path.partition(".")
        around = {key: each for key, each in value.items() if not isinstance(each, dict | list)}
        for row in _rows(value.get(name), rest) if path else [value]:
            yield {**around, **row}


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _words(name: str, value: Any) -> str:
    return value if isinstance(value, str) else f"{name.replace('_', ' ')} {value}"
