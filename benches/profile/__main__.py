"""``python -m benches.profile``: the share of each part of the engine in a step's time."""

from __future__ import annotations

import os

from benches.command import main
from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings


@settings_options("model", "device", "dtype", "max_step_tokens")
def profile(
    settings: Settings,
    prompt_tokens: parameters.PromptTokensOption = 128,
    new_tokens: parameters.NewTokensOption = 32,
    concurrency: parameters.InFlightOption = 16,
    threads: parameters.ThreadsOption = None,
    temperature: parameters.TemperatureOption = 0.0,
    seed: parameters.SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show how much of a step each part of the engine takes, in prefill and in decode.

    torch's profiler measures a range around each part. Every microsecond counts once; "rest" is
    the time outside all parts. The same load also runs without the profiler, to show its cost.
    """
    # Silences the profiler's own log; torch reads the variable when it loads.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from benches.profile.profile import measure_profile
    from llorch_worker.bench.load import Load

    screen = Screen(as_json=as_json)
    load = Load.alike(concurrency, prompt_tokens, new_tokens, seed, temperature)
    plan = parameters.plan(screen, settings, 1, threads)
    print_figures(screen, measure_profile(plan, load))


if __name__ == "__main__":
    main(profile, "profile")
