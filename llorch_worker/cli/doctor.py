"""``llorch doctor``: check everything that a worker and a producer need."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

import typer

from llorch_worker.cli.options import FlowerPortOption, JsonOption, settings_of_one_worker
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import printable
from llorch_worker.contract.command_errors import FAILED
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.cli.checks import Check

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


@settings_of_one_worker("device", "redis_url", "drafter")
def doctor(
    settings: Settings,
    flower_port: FlowerPortOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check Python, Redis, devices, model and ports; give a verdict and a remedy for each.

    Exits 1 if a check fails; warnings do not count as failures.
    """
    from llorch_worker.cli import checks

    screen = Screen(as_json=as_json)
    asked_for_redis = "redis_url" in settings.model_fields_set
    found: list[Check] = []
    for check in chain(
        checks.packages(starts_redis=not asked_for_redis),
        checks.environment(),
        checks.redis_server(settings.redis_url, asked_for=asked_for_redis),
        checks.devices(settings),
        checks.models(settings),
        checks.flower(flower_port),
        checks.served_workers(settings.redis_url, found),
    ):
        found.append(check)
        _show(screen, check)
    failures = sum(check.verdict == "fail" for check in found)
    if as_json:
        screen.document({"ok": not failures, "checks": [asdict(check) for check in found]})
    else:
        warnings = sum(check.verdict == "warn" for check in found)
        screen.out.print(
            f"\n{counted(len(found), 'check')}: {failures} failed, {counted(warnings, 'warning')}.",
            style="bold red" if failures else "bold",
        )
    if failures:
        raise typer.Exit(FAILED)


def _show(screen: Screen, check: Check) -> None:
    if screen.as_json:
        return
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    mark, style = _MARKS[check.verdict]
    line = Table.grid(padding=(0, 1))
    line.add_column(width=1)
    line.add_column(width=9)
    line.add_column(overflow="fold")
    line.add_row(Text(mark, style), Text(check.subject, "bold"), Text(printable(check.finding)))
    if check.remedy:
        line.add_row(
            "", "", Text(f"→ {printable(check.remedy)}", "" if check.verdict == "warn" else style)
        )
    screen.out.print(Padding(line, (0, 0)))
