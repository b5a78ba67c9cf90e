"""``llorch generate``: text from a model file, without a queue."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llorch_worker.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    KvDtypeOption,
    MaxContextOption,
    ModelFileOption,
    settings_from,
)
from llorch_worker.cli.sampling import request_fields, request_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.cli.terminal.story import StoryPrinter, summary_line
from llorch_worker.contract import GenerationRequest
from llorch_worker.stack.interrupts import deaf_from_now_on


@request_options
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from stdin.")],
    fields: dict[str, Any],
    model: ModelFileOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    max_context: MaxContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text here and now: no Redis, no worker.

    Ctrl-C stops it.
    """
    screen = Screen(as_json=as_json)
    # Checked before the model loads: a wrong number should not cost a minute.
    request = GenerationRequest(**request_fields(prompt, fields))
    settings = settings_from(
        model=model, device=device, dtype=dtype, kv_dtype=kv_dtype, max_context=max_context
    )
    extras.require("worker")
    from llorch_worker.engine import Engine

    with Engine.load(
        settings.model,
        model_name=settings.served_name,
        progress=screen.loading_bar(f"loading {settings.served_name}"),
        **settings.engine_options | {"max_sequences": request.n},
    ) as engine:
        generation = engine.submit(request)
        printer = StoryPrinter(screen, choices=request.n, opening=request.prompt)
        try:
            for event in generation.events():
                printer.show(event)
        except KeyboardInterrupt:
            deaf_from_now_on()
            generation.cancel()
            printer.end()
            raise
        printer.end()
        result = generation.result()
    if as_json:
        screen.document(result.model_dump(mode="json", exclude_none=True))
    else:
        screen.note(summary_line(result))
