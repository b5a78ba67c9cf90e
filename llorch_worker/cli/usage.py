"""``llorch usage``: what each tenant used, by model and day."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, fields
from datetime import datetime
from typing import Annotated

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import printable
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.settings import Settings

DayOption = Annotated[
    datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The first or last UTC day.")
]


@settings_options("redis_url")
def usage(
    tenant: Annotated[
        str | None, typer.Option(help="Only this tenant; over HTTP it is the key's name.")
    ] = None,
    since: DayOption = None,
    until: DayOption = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Show jobs, tokens and hours of worker time by day, tenant and model, by default of 30 days.

    --csv and --json have the worker time in milliseconds.
    """
    from llorch_worker.broker.connections.connection import broker_errors, connect
    from llorch_worker.broker.jobs import usage as counts

    if as_csv and as_json:
        raise usage_error("give --csv or --json, not both")
    first, last = counts.days_of(since and since.date(), until and until.date())
    with broker_errors(settings.redis_url), connect(settings.redis_url) as client:
        rows = [asdict(row) for row in counts.read(client, first, last, tenant)]
    names = [each.name for each in fields(counts.UsageRow)]
    screen = Screen(as_json=as_json)
    if as_json:
        screen.document([row | {"day": row["day"].isoformat()} for row in rows])
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif not rows:
        screen.note(f"No job ended from {first} to {last}.")
    else:
        from rich.table import Table

        table = Table("day", "tenant", "model", box=None, header_style="dim")
        table.columns[0].no_wrap = True
        for title in ("jobs", "failed", "prompt", "cached", "new tokens", "hours"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in rows:
            *words, jobs, failed, prompt, cached, new, worker_ms = row.values()
            figures = (f"{count:,}" for count in (jobs, failed, prompt, cached, new))
            table.add_row(
                *(printable(str(word)) for word in words), *figures, f"{worker_ms / 3.6e6:,.2f}"
            )
        screen.wide.print(table)
