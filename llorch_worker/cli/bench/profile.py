"""``llorch bench profile``: the share of each part of the engine in a step's time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from llorch_worker.bench.instruments.flamegraph import Flamegraph
from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings

_SILENT: Final = "99"


@settings_options("model", "device", "dtype", "max_step_tokens")
def profile(
    settings: Settings,
    prompt_tokens: parameters.PromptTokensOption = 128,
    new_tokens: parameters.NewTokensOption = 32,
    concurrency: parameters.InFlightOption = 16,
    threads: parameters.ThreadsOption = None,
    temperature: parameters.TemperatureOption = 0.0,
    flamegraph: Annotated[
        Path | None,
        typer.Option(
            "--flamegraph", metavar="PATH", help="Also sample with py-spy: out.svg or out.json."
        ),
    ] = None,
    seed: parameters.SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show how much of a step each part of the engine takes, in prefill and in decode.

    torch's profiler measures a range around each part. Every microsecond counts once; "rest" is
    the time outside all parts. A part is critical above 10% of the time, moderate from 5% and minor
    below. The same load also runs without the profiler, to show the cost of profiling.
    """
    screen = Screen(as_json=as_json)
    sampled = None if flamegraph is None else Flamegraph.at(flamegraph)
    extras.require("worker")
    # Silences the profiler's own log; torch reads the variable when it loads.
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    from llorch_worker.bench.instruments.timed_load import Load
    from llorch_worker.bench.profile import measure_profile

    figures = measure_profile(
        settings,
        Load(prompt_tokens, new_tokens, concurrency, temperature, seed),
        threads,
        sampled,
        screen.loading_bar(f"loading {settings.served_name}"),
        lambda what: screen.note(f"profiling {what}"),
    )
    print_figures(screen, figures)
