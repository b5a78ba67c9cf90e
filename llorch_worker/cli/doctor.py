"""``llorch doctor``: is everything here that a worker and a producer need?"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.options import (
    DeviceOption,
    JsonOption,
    ModelFileOption,
    RedisOption,
    settings_from,
)
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import FAILED
from llorch_worker.contract.quantities import counted

if TYPE_CHECKING:
    from llorch_worker.cli.checks import Check

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def doctor(
    model: ModelFileOption = None,
    device: DeviceOption = None,
    redis: RedisOption = None,
    flower_port: Annotated[
        int | None,
        typer.Option("--flower-port", help="The port that Flower is to have (default: 5555)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at Python, Redis, device, model and ports: a verdict and a remedy for each.

    Exits 1 if anything fails; warnings are things to know.
    """
    from llorch_worker.cli import checks

    settings = settings_from(model=model, device=device, redis_url=redis)
    screen = Screen(as_json=as_json)
    asked_for_redis = "redis_url" in settings.model_fields_set
    found: list[Check] = []
    for check in chain(
        checks.packages(),
        checks.redis_server(settings.redis_url, asked_for=asked_for_redis),
        checks.devices(settings),
        checks.model_file(settings),
        checks.flower(flower_port),
        checks.served_workers(settings.redis_url),
    ):
        found.append(check)
        _show(screen, check)
    failures = sum(check.verdict == "fail" for check in found)
    if as_json:
        screen.document({"ok": not failures, "checks": [check.model_dump() for check in found]})
    else:
        warnings = sum(check.verdict == "warn" for check in found)
        screen.out.print(
            f"\n{counted(len(found), 'check')}: {failures} failed, {warnings} to know.",
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
    line.add_row(Text(mark, style), Text(check.subject, "bold"), Text(check.finding))
    if check.remedy:
        line.add_row("", "", Text(f"→ {check.remedy}", "" if check.verdict == "warn" else style))
    screen.out.print(Padding(line, (0, 0)))
