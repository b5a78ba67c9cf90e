"""``llorch generate``: text from a model file, without a queue."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.request_options import request_fields, request_options, with_sampling
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.interrupts import deaf_from_now_on
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.cli.terminal.story import StoryPrinter, show_outcome
from llorch_worker.contract import GenerationRequest
from llorch_worker.settings import Settings


@settings_options("model", "device", "dtype", "kv_dtype", "max_context")
@request_options
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    settings: Settings,
    fields: dict[str, Any],
    as_json: JsonOption = False,
) -> None:
    """Generate text in this process, without Redis or a worker.

    Ctrl-C stops it.
    """
    screen = Screen(as_json=as_json)
    # Checked before the model loads, because a wrong number should not cost a minute.
    request = GenerationRequest(**request_fields(prompt, fields))
    extras.require("worker")
    from llorch_worker.engine import Engine
    from llorch_worker.intake.process import IntakeProcess
    from llorch_worker.model_files.hub import local_path

    with (
        IntakeProcess(local_path(settings.model)) as intake,
        Engine.load(
            settings.model,
            settings.engine_options,
            model_name=settings.served_name,
            progress=screen.loading_bar(f"loading {settings.served_name}"),
            intake=intake,
            max_sequences=request.n,
        ) as engine,
    ):
        request, sampling = with_sampling(request, engine.facts.generation_config, settings)
        if sampling:
            screen.note(sampling)
        generation = engine.submit(request)
        story = StoryPrinter(screen, choices=request.n, opening=request.prompt)
        try:
            for event in generation.events():
                story.show(event)
        except KeyboardInterrupt:
            deaf_from_now_on()
            generation.cancel()
            raise
        finally:
            story.end()
        result = generation.result()
    show_outcome(screen, result)
