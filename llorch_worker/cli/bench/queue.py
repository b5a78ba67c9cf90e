"""``llorch bench queue``: the cost of Redis and Celery in latency and throughput."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings

MOST_JOBS = 10_000


@settings_options("model", "device", "dtype", "max_step_tokens", "kv_cache_bytes")
def queue(
    settings: Settings,
    jobs: Annotated[
        str, typer.Option("--jobs", help="Jobs at once: a number, or a list: 10,100,1000.")
    ] = "64",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Mean tokens of a prompt.")
    ] = 128,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Mean tokens that a job generates.")
    ] = 32,
    concurrency: parameters.InFlightOption = 16,
    single_jobs: Annotated[
        int, typer.Option("--single-jobs", min=2, help="Jobs timed one at a time.")
    ] = 100,
    passes: parameters.PassesOption = 3,
    threads: parameters.ThreadsOption = None,
    seed: parameters.SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Run one load straight through the engine and through Redis; passes alternate.

    The command starts its own Redis and worker, and sends jobs through the real client. Lengths
    vary from 0.5 to 1.5 times the mean. Through Redis a single job may take 5 ms more at p50, and
    at least 97% of the engine's tokens per second must arrive.
    """
    screen = Screen(as_json=as_json)
    numbers = parameters.parse_numbers("--jobs", jobs, MOST_JOBS)
    settings = settings.model_copy(update={"max_sequences": concurrency, "queue_limit": 0})
    extras.require("worker")
    from llorch_worker.worker.card.assignment import limit_spinning

    # Before torch loads, because threads that spin here would take a processor from the worker.
    limit_spinning()
    from llorch_worker.bench.load import Load, around
    from llorch_worker.bench.one_worker import one_worker
    from llorch_worker.bench.queue import checked_settings, measure_queue
    from llorch_worker.cli.terminal.interrupts import terminable, uninterrupted_exit

    load = Load(max(numbers), around(prompt_tokens), around(new_tokens), seed)
    settings = checked_settings(settings, load)
    plan = parameters.plan(screen, settings, passes, threads)
    with terminable(), uninterrupted_exit(one_worker(settings, threads)) as stack:
        figures = measure_queue(plan, load, numbers, single_jobs, stack)
    print_figures(screen, figures)
