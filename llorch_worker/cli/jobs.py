"""``llorch watch`` and ``llorch cancel``: jobs that are already on their way."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_worker.cli.options import JsonOption, RedisOption, settings_from
from llorch_worker.cli.status import unknown_job
from llorch_worker.cli.terminal.screen import Screen

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]


def watch(job: JobArgument, redis: RedisOption = None, as_json: JsonOption = False) -> None:
    """Print a job's tokens as they come, from its first.

    Ctrl-C stops the watching, not the job. With --json, wait for the result and print that.
    """
    screen = Screen(as_json=as_json)
    from llorch_worker.cli.following import follow
    from llorch_worker.client import Client

    with Client(settings_from(redis_url=redis)) as client:
        found = client.job(job)
        if found.status().state == "unknown":
            raise unknown_job(job)
        follow(screen, found, request=None, live=True)


def cancel(job: JobArgument, redis: RedisOption = None, as_json: JsonOption = False) -> None:
    """Cancel a job: a waiting one ends at once and never runs, a running one within a step."""
    screen = Screen(as_json=as_json)
    from llorch_worker.client import Client

    with Client(settings_from(redis_url=redis)) as client:
        found = client.job(job)
        state = found.status().state
        if state == "unknown":
            raise unknown_job(job)
        asked = found.cancel()
    if as_json:
        screen.document({"id": job, "cancelling": asked, "state": state})
    elif asked and state == "queued":
        screen.out.print(f"{job} is cancelled: it never runs.", markup=False)
    elif asked:
        screen.out.print(f"{job} will be cancelled (it was {state}).", markup=False)
    else:
        screen.out.print(f"{job} had ended already: {state}.", markup=False)
