"""``llorch bench report``: saved runs as one HTML page with plots."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from llorch_worker.cli.options import JsonOption
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.quantities import counted


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN.json", help="Saved --json runs of llorch bench.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="PATH", help="The page.")] = Path(
        "report.html"
    ),
    as_json: JsonOption = False,
) -> None:
    """Put saved runs on one HTML page with plots.

    Takes what llorch bench prints with --json, and pytest-benchmark's own files. Runs of one
    command with the same load are set side by side, with ratios to the first. What is no such run
    or cannot be read is skipped, and said so.
    """
    screen = Screen(as_json=as_json)
    from llorch_worker.bench.report.readings import NotARun, Run
    from llorch_worker.bench.report.runs import read_run

    found: list[Run] = []
    skipped: dict[Path, str] = {}
    for path in runs:
        try:
            found.append(read_run(path))
        except NotARun as reason:
            skipped[path] = str(reason)
    if not found:
        raise CommandError("NO_RUNS", _none_found(skipped))
    extras.require("bench")
    from llorch_worker.bench.report.page import page

    for path, why in skipped.items():
        screen.note(f"skipped {path}: {why}", "yellow")
    out.write_text(page(found, datetime.now().astimezone()), encoding="utf-8")
    if as_json:
        screen.document(
            {
                "page": str(out),
                "runs": [{"path": str(run.path), "kind": run.kind} for run in found],
                "skipped": [{"path": str(path), "reason": why} for path, why in skipped.items()],
            }
        )
    else:
        screen.write_raw(f"{counted(len(found), 'run')} on {out}\n")


def _none_found(skipped: dict[Path, str]) -> str:
    reasons = "; ".join(f"{path}: {reason}" for path, reason in skipped.items())
    return f"none of these is a saved run ({reasons}); save one with llorch bench engine --json"
