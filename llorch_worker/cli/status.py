"""``llorch status``: workers, models and queues, or the state of one job."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
from llorch_worker.contract.quantities import counted, human_ms, human_time, iso_time
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from redis import Redis

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
    from llorch_worker.broker.figures.fleet_client import FleetClient
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
            _show(screen, reader.last, url)


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
            _show(screen, found, url)
        else:
            screen.line(str(found))
        screen.line("")


def _show(screen: Screen, reading: Reading, url: str) -> None:
    from llorch_worker.broker.connections.url import safe_url
    from llorch_worker.cli.fleet_tables import models_table, notices, summary, workers_table

    fleet = reading.fleet
    if fleet.workers:
        screen.wide.print(summary(fleet), end="\n\n")
        screen.wide.print(workers_table(fleet.workers), "")
    if fleet.models:
        screen.wide.print(models_table(fleet.models), "")
    for notice in notices(reading):
        screen.out.print(notice, soft_wrap=True)
    if not fleet.workers:
        screen.note(f"This is {safe_url(url)}.")


def _show_job(screen: Screen, url: str, job_id: str) -> None:
    from llorch_worker.client import Client

    with Client(url) as client:
        found: JobStatus = client.job(job_id).status()
        served = found.position is None or bool(client.workers())
        # Those of a job that has ended are in its result.
        tokens = (
            found.result.usage.completion if found.result else _journalled(client.redis, job_id)
        )
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
                "sent_at": found.sent_at_s and iso_time(found.sent_at_s),
                "tokens": tokens,
                "usage": found.result.usage.model_dump(mode="json") if found.result else None,
                "timings": found.result.timings.model_dump(mode="json") if found.result else None,
                "error": found.error.model_dump(mode="json") if found.error else None,
            }
        )
        return
    by = f" by {found.worker}" if found.worker else ""
    why = f": {found.error.code}: {found.error.message}" if found.error else ""
    what = ", ".join(_details(found, tokens, served=served))
    screen.line(f"{found.id} {found.state}{by}{what and ', '}{what}{why}")


def _journalled(redis: Redis, job_id: str) -> int:
    """The tokens that the job has generated so far, in all choices; none of a job of texts."""
    from llorch_worker.broker.jobs import journal

    choices = journal.read(redis, job_id).journal.choices
    return sum(len(choice.token_ids) for choice in choices.values())


def _details(found: JobStatus, tokens: int, *, served: bool) -> Iterator[str]:
    """How far the job is, and since when."""
    if found.position is not None:
        ahead = found.position.place - 1
        yield "next" if ahead == 0 else f"behind about {counted(ahead, 'job')}"
        if not served:
            yield "no worker is running"
        elif found.position.starts_in_s is not None:
            yield f"starts in about {human_time(found.position.starts_in_s)}"
    if found.result is not None:
        from llorch_worker.cli.terminal.story import outcome

        yield outcome(found.result)
        if found.result.attempts == 1:  # else it is that of the last attempt
            yield f"after {human_ms(found.result.timings.queue_ms)} in the queue"
    elif tokens or found.state == "running":
        yield counted(tokens, "token") + ("" if found.ended else " so far")
    if found.sent_at_s is not None:
        yield f"sent {human_time(time.time() - found.sent_at_s)} ago"


def unknown_job(job_id: str) -> CommandError:
    """The error for an id of which Redis has no trace."""
    return CommandError(
        "UNKNOWN_JOB",
        f"no job {job_id[:80]!r}; give the whole id, as llorch submit prints it; results are kept "
        "for LLORCH_RESULT_TTL_S, and a job from another producer is known once a worker takes it",
    )
