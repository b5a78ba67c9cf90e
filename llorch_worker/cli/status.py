"""``llorch status``: workers, models and queues, or the state of one job."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.options import (
    DEFAULT_INTERVAL_S,
    IntervalOption,
    JsonOption,
    settings_options,
)
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.contract.quantities import counted, human_time
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.broker.waiting import Position
    from llorch_worker.cli.fleet_reading import FleetReader, Reading
    from llorch_worker.client import JobStatus


@settings_options("redis_url")
def status(
    job: Annotated[
        str | None, typer.Argument(help="A job's id; without one, the whole fleet.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    interval: IntervalOption = DEFAULT_INTERVAL_S,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Show workers, models and queues, or the state of one job.

    Workers' figures are up to 5 s old. --watch with --json prints one document a line.
    """
    screen = Screen(as_json=as_json)
    url = settings.redis_url
    if job is not None:
        if watch:
            raise usage_error(f"--watch is for all jobs; llorch watch {job[:80]} follows one")
        _show_job(screen, url, job)
        return
    from llorch_worker.broker.fleet_client import FleetClient
    from llorch_worker.cli.fleet_reading import FleetReader, print_lines

    with FleetClient(url) as client:
        reader = FleetReader(client)
        if watch and as_json:
            print_lines(screen, reader, interval)
        elif watch:
            _watch(screen, reader, url, interval)
        elif as_json:
            screen.document(reader.last.document())
        else:
            _show(screen, reader.last)


def _watch(screen: Screen, reader: FleetReader, url: str, interval_s: float) -> None:
    from llorch_worker.cli.fleet_reading import Reading, readings
    from llorch_worker.cli.fleet_screen import FleetScreen, status_head
    from llorch_worker.cli.terminal.live_screen import is_screen

    if is_screen(screen.out):
        FleetScreen(screen.out, reader, url, "llorch status", status_head).run(interval_s)
        return
    for found in readings(reader, interval_s):
        screen.line(time.strftime("%Y-%m-%d %H:%M:%S"))
        if isinstance(found, Reading):
            _show(screen, found)
        else:
            screen.line(str(found))
        screen.line("")


def _show(screen: Screen, reading: Reading) -> None:
    from llorch_worker.cli.fleet_tables import models_table, notices, workers_table

    fleet = reading.fleet
    if fleet.workers:
        screen.wide.print(workers_table(fleet.workers), "")
    if fleet.models:
        screen.wide.print(models_table(fleet.models), "")
    for notice in notices(reading):
        screen.out.print(notice, soft_wrap=True)


def _show_job(screen: Screen, url: str, job_id: str) -> None:
    from llorch_worker.client import Client

    with Client(url) as client:
        found: JobStatus = client.job(job_id).status()
    if found.forgotten:
        raise CommandError(
            "UNKNOWN_JOB",
            f"job {job_id[:80]!r} has ended, and its result was deleted; a message that repeats "
            "its id is dropped, so send a job again with a new id",
        )
    if found.state == "unknown":
        raise unknown_job(job_id)
    if screen.as_json:
        screen.document(
            {
                "id": found.id,
                "state": found.state,
                "worker": found.worker,
                "position": found.position and asdict(found.position),
                "error": found.error.model_dump(mode="json") if found.error else None,
            }
        )
        return
    by = f" by {found.worker}" if found.worker else ""
    why = f": {found.error.code}: {found.error.message}" if found.error else ""
    screen.line(f"{found.id} {found.state}{by}{_waits(found.position)}{why}")


def _waits(position: Position | None) -> str:
    if position is None:
        return ""
    ahead = position.place - 1
    behind = "next" if ahead == 0 else f"behind about {counted(ahead, 'job')}"
    start = position.starts_in_s
    return f", {behind}" + ("" if start is None else f", starts in about {human_time(start)}")


def unknown_job(job_id: str) -> CommandError:
    """The error for an id of which Redis has no trace."""
    return CommandError(
        "UNKNOWN_JOB",
        f"no job {job_id[:80]!r}; give the whole id, as llorch submit prints it; results are kept "
        "for a day, and a job from another producer is known once a worker takes it",
    )
