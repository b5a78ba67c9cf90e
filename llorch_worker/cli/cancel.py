"""``llorch cancel``: end a submitted job early."""

from __future__ import annotations

from llorch_worker.cli.options import JobArgument, JsonOption, settings_options
from llorch_worker.cli.status import unknown_job
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings


@settings_options("redis_url")
def cancel(job: JobArgument, settings: Settings, as_json: JsonOption = False) -> None:
    """Cancel a job. A waiting job ends at once and never runs; a running one ends within a step."""
    screen = Screen(as_json=as_json)
    from llorch_worker.client import Client

    with Client(settings) as client:
        found = client.job(job)
        state = found.status().state
        if state == "unknown":
            raise unknown_job(job)
        asked = found.cancel()
    if as_json:
        screen.document({"id": job, "cancelling": asked, "state": state})
    elif asked and state == "queued":
        screen.line(f"{job} is cancelled and never runs")
    elif asked:
        screen.line(f"{job} is being cancelled (it was {state})")
    else:
        screen.line(f"{job} had already ended: {state}")
