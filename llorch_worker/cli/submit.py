"""``llorch submit``: jobs into the queue, one from the command line or many from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llorch_worker.cli.options import JsonOption, RedisOption, settings_from
from llorch_worker.cli.sampling import read_requests, request_fields, request_options
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.stack.interrupts import deaf_from_now_on


@request_options
def submit(
    fields: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue; - reads it from stdin.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The name under which it is served.")
    ] = None,
    priority: Annotated[
        str | None, typer.Option("--priority", help=r"high, normal or low \[normal].")
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option("--worker", metavar="NAME", help="The worker that is to take it: gpu0@host."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", "-f", help="JSON lines, one request each; - is stdin."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Results of --file, as JSON lines.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for it and print the text.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the tokens as they come.")
    ] = False,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put a job into the queue and print its id.

    With --file, one job a line; the options are defaults that a line may override. With --wait
    or --stream, Ctrl-C cancels what was submitted.
    """
    screen = Screen(as_json=as_json)
    fields |= {k: v for k, v in (("model", model), ("priority", priority)) if v is not None}
    if (prompt is None) == (file is None):
        raise usage_error("give either a prompt or --file")
    if file is not None and stream:
        raise usage_error("--stream shows one job; with --file use --wait")
    if output is not None and (file is None or not wait):
        raise usage_error("--output takes the results of --file with --wait")
    settings = settings_from(redis_url=redis)
    if file is not None:
        from llorch_worker.cli.many import submit_many

        requests = read_requests(file, fields)
        submit_many(screen, settings, requests, worker=worker, wait=wait, output=output)
        return
    request = GenerationRequest(**request_fields(prompt, fields))
    from llorch_worker.cli.following import follow
    from llorch_worker.client import Client

    with Client(settings) as client:
        job = client.submit(request, worker=worker)
        if stream or wait:
            if not client.workers():
                screen.note("no worker is running: the job waits until one comes", "yellow")
            try:
                follow(screen, job, request=request, live=stream)
            except KeyboardInterrupt:
                deaf_from_now_on()
                job.cancel()
                raise
        elif as_json:
            screen.document({"id": job.id})
        else:
            screen.out.print(job.id, markup=False)
