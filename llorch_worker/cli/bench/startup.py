"""``llorch bench startup``: the time until a model is ready, and its memory."""

from __future__ import annotations

from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings


@settings_options("model", "max_sequences", "max_context", "kv_cache_bytes", "device", "dtype")
def startup(
    settings: Settings,
    passes: parameters.PassesOption = 4,
    threads: parameters.ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how long a model takes from its file to its first token.

    The yardstick is one thread that reads the file from disk. The file is dropped from the page
    cache before each read and load. Every load runs in its own process; its time begins when torch
    is imported.
    """
    screen = Screen(as_json=as_json)
    extras.require("worker")
    from llorch_worker.bench.startup import measure_startup
    from llorch_worker.cli.terminal.interrupts import terminable

    with terminable():
        figures = measure_startup(parameters.plan(screen, settings, passes, threads))
    print_figures(screen, figures)
