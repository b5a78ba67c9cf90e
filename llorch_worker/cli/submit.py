"""``llorch submit``: enqueue one job from the command line."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llorch_worker.cli.enqueue import enqueue
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.request_options import request_fields, request_options, with_sampling
from llorch_worker.cli.terminal.interrupts import deaf_from_now_on
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.settings import Settings


@settings_options("redis_url")
@request_options
def submit(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    model: Annotated[
        str | None, typer.Option("--model", help="The name under which the model is served.")
    ] = None,
    priority: Annotated[
        str | None, typer.Option("--priority", help="high, normal or low [normal].")
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option("--worker", hidden=True),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job and print its text.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they arrive.")] = False,
    *,
    settings: Settings,
    as_json: JsonOption = False,
    fields: dict[str, Any],
) -> None:
    """Put a job into the queue and print its id.

    With --wait or --stream, Ctrl-C cancels it. ``llorch batch run`` runs a file of requests.
    """
    screen = Screen(as_json=as_json)
    if worker is not None:
        from llorch_worker.client.admission import NO_WORKER

        raise usage_error(f"--worker {NO_WORKER.rule}")
    fields |= {k: v for k, v in (("model", model), ("priority", priority)) if v is not None}
    request = GenerationRequest(**request_fields(prompt, fields))
    from llorch_worker.broker.connections.url import safe_url
    from llorch_worker.cli.terminal.story import follow
    from llorch_worker.client import Client

    with Client(settings) as client:
        card = client.model_card(request.model)
        request, sampling = with_sampling(request, card.generation_config, settings)
        job = enqueue(client, request, stream=stream and not as_json)
        if sampling:
            screen.note(sampling)
        if not client.workers():
            screen.note(
                f"no worker is running at {safe_url(client.settings.redis_url)}: the job waits "
                "until one starts",
                "yellow",
            )
        if stream or wait:
            try:
                follow(screen, job, request=request, live=stream)
            except KeyboardInterrupt:
                deaf_from_now_on()
                cancelled = job.cancel()
                screen.note(f"{job.id} {'is cancelled' if cancelled else 'had already ended'}")
                raise
        elif as_json:
            screen.document({"id": job.id})
        else:
            screen.line(job.id)
            screen.note("llorch watch ID prints its text, llorch status ID its state")
