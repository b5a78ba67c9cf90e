"""What tests of measurements share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llorch_worker.bench.instruments.provenance import Figures
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.terminal.screen import Screen

Printed = Callable[[Figures], list[str]]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """The lines that a command prints of its figures without ``--json``, at 80 columns.

    Figures are read from a document of ``--json``, so that one run serves both.
    """
    monkeypatch.setenv("COLUMNS", "80")

    def printed(figures: Figures) -> list[str]:
        print_figures(Screen(as_json=False), figures)
        lines = capsys.readouterr().out.splitlines()
        # The first ones hold the command and the processor, however long they are.
        assert max(map(len, lines[4:])) <= 80
        return lines

    return printed
