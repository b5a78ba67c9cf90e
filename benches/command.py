"""A benchmark as a program, and its table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from llorch_worker.cli.terminal.command_line import command_line, run


def main(command: Callable[..., Any], name: str) -> NoReturn:
    """Runs ``command`` as ``python -m benches.<name>``, with the errors and exit codes of
    ``llorch``; a number that it returns is the exit code."""
    app = command_line()
    app.command()(command)
    raise SystemExit(run(app, f"python -m benches.{name}"))


def heading(*titles: str) -> None:
    """Begins a table in Markdown, to be pasted into a page."""
    row(*titles)
    row(*["---"] * len(titles))


def row(*cells: object) -> None:
    """Prints a line of the table as soon as it is measured."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
