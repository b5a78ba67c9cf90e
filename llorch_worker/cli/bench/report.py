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

    Takes the output of llorch bench with --json, and the files of pytest-benchmark. Runs of one
    command share plots; tables add ratios to the first run. Files without a run are skipped with
    the reason.
    """
    screen = Screen(as_json=as_json)
    from llorch_worker.bench.report import NotARun, Run, page, read_run

    found: list[Run] = []
    skipped: dict[Path, str] = {}
    for path in runs:
        try:
            found.append(read_run(path))
        except NotARun as reason:
            skipped[path] = str(reason)
    if not found:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in skipped.items())
        raise CommandError(
            "NO_RUNS",
            f"no file holds a run ({reasons}); save one with llorch bench engine --json",
        )
    extras.require("bench")
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
        screen.write_raw(f"wrote {counted(len(found), 'run')} to {out}\n")
