"""The output of benchmarks: a JSON document, or provenance and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llorch_worker.cli.terminal.screen import Screen

if TYPE_CHECKING:
    from llorch_worker.bench.instruments.provenance import Figures


def print_figures(screen: Screen, figures: Figures) -> None:
    """Print one JSON document, or the figures' provenance and tables."""
    from rich.text import Text

    if screen.as_json:
        screen.document(figures.model_dump(mode="json"))
        return
    for line in figures.provenance.lines():
        screen.out.print(Text(line, "dim"), soft_wrap=True)
    screen.out.print()
    for part in figures.parts():
        screen.out.print(Text(part) if isinstance(part, str) else part)
