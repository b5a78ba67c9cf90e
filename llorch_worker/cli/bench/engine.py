"""``llorch bench engine``: tokens per second, latencies, and shares of the machine's limits."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings

MAX_CONCURRENCY = 1024


@settings_options("model", "device", "dtype", "max_step_tokens")
def engine(
    settings: Settings,
    prompt_tokens: parameters.PromptTokensOption = 128,
    new_tokens: parameters.NewTokensOption = 32,
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at once: a number, or a list: 1,8,16.")
    ] = "16",
    threads: parameters.ThreadsOption = None,
    passes: parameters.PassesOption = 3,
    temperature: parameters.TemperatureOption = 0.0,
    seed: parameters.SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure the engine alone, without a queue.

    Prompts are random ids, and no request ends early. Passes that ask for one token time prefill.
    Decode is timed while all sequences decode and none prefills. A warm-up runs first and is
    reported separately. Bytes and FLOP are the minimum for the model's shape; the same process
    measures the machine's ceilings.
    """
    screen = Screen(as_json=as_json)
    concurrencies = parameters.parse_numbers("--concurrency", concurrency, MAX_CONCURRENCY)
    extras.require("worker")
    from llorch_worker.bench.engine import measure_engine
    from llorch_worker.bench.load import Load

    load = Load.alike(1, prompt_tokens, new_tokens, seed, temperature)
    plan = parameters.plan(screen, settings, passes, threads)
    print_figures(screen, measure_engine(plan, load, concurrencies))
