"""``llorch watch``: a submitted job's tokens as they arrive."""

from __future__ import annotations

from llorch_worker.cli.options import JobArgument, JsonOption, settings_options
from llorch_worker.cli.status import unknown_job
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings


@settings_options("redis_url")
def watch(job: JobArgument, settings: Settings, as_json: JsonOption = False) -> None:
    """Print a job's tokens as they arrive, from the first on.

    Ctrl-C stops watching, not the job. With --json, wait for the result and print it.
    """
    from llorch_worker.cli.terminal.story import follow
    from llorch_worker.client import Client

    with Client(settings) as client:
        found = client.job(job, known=True)
        if found.status().state == "unknown":
            raise unknown_job(job)
        follow(Screen(as_json=as_json), found, request=None, live=True)
