"""``llorch purge``: delete the jobs of a queue that wait."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings


@settings_options("redis_url")
def purge(
    queue: Annotated[str, typer.Argument(help="llorch.MODEL, or llorch.MODEL:high.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do it.")] = False,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Delete the jobs of a queue that wait, without ending them: whoever waits for one is told that
    it is lost, and a batch sends it again. ``celery purge`` sees only those that no worker has
    looked at."""
    screen = Screen(as_json=as_json)
    from llorch_worker.broker.connections.connection import broker_errors, connect
    from llorch_worker.broker.queues import is_job_queue
    from llorch_worker.broker.waiting.waiting import length
    from llorch_worker.broker.waiting.waiting import purge as delete

    if not is_job_queue(queue):
        raise usage_error(f"{queue} is no queue of jobs; they are named llorch.MODEL")
    with connect(settings.redis_url) as client, broker_errors(settings.redis_url):
        if not yes:
            jobs = counted(length(client, queue), "waiting job")
            raise usage_error(f"{queue} has {jobs}; give --yes to delete what waits")
        deleted = delete(client, queue)
    if as_json:
        screen.document({"queue": queue, "deleted": deleted})
    else:
        screen.line(f"deleted {counted(deleted, 'job')} of {queue}")
