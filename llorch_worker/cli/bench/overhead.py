"""``llorch bench overhead``: the time that the engine adds to the model's."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.demo_model import model_path
from llorch_worker.settings import Settings


@settings_options("device", "dtype")
def overhead(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH", help="Also measure around this model."),
    ] = None,
    concurrency: parameters.InFlightOption = 16,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Decode steps per row.")] = 200,
    threads: parameters.ThreadsOption = None,
    seed: parameters.SeedOption = 0,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Measure a decode step outside the model: scheduler, sampler, detokeniser, events.

    The engine runs around a model that computes nothing, at two vocabulary sizes. With --model it
    also runs around that one.
    """
    screen = Screen(as_json=as_json)
    extras.require("worker")
    import torch

    from llorch_worker.bench.overhead import measure_overhead

    if threads is not None:
        torch.set_num_threads(threads)
    loading = screen.loading_bar("loading")
    chosen = settings.model_copy(update={"model": model_path(model)}) if model else None
    print_figures(screen, measure_overhead(concurrency, steps, seed, chosen, loading))
