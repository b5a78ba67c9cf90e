"""``llorch bench queue``: the cost of Redis and Celery in latency and throughput."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.options import JsonOption, given_options, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.settings import Settings

MOST_JOBS = 10_000
_OF_NO_OP = frozenset({"no_op", "no_op_jobs", "single_jobs", "concurrency", "passes", "as_json"})
"""Parameters that apply to --no-op."""


@settings_options("model", "device", "dtype", "max_step_tokens", "kv_cache_bytes")
def queue(
    context: typer.Context,
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
    no_op: Annotated[
        bool,
        typer.Option("--no-op", help="Measure only the queue, with a model that computes nothing."),
    ] = False,
    no_op_jobs: Annotated[
        int, typer.Option("--no-op-jobs", min=1, max=100_000, help="Jobs of a --no-op pass.")
    ] = 2_000,
    threads: parameters.ThreadsOption = None,
    seed: parameters.SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Run one load straight through the engine and through Redis; passes alternate.

    The command starts its own Redis and worker, and sends jobs through the real client. Lengths
    vary from 0.5 to 1.5 times the mean. Through Redis a single job may take 5 ms more at p50, and
    at least 97% of the engine's tokens per second must arrive. --no-op compares the same worker,
    without a model, with stock Celery's thread pool and a task that does nothing.
    """
    screen = Screen(as_json=as_json)
    _refuse_ignored(given_options(context), no_op=no_op)
    numbers = parameters.parse_numbers("--jobs", jobs, MOST_JOBS)
    settings = settings.model_copy(update={"max_sequences": concurrency, "queue_limit": 0})
    extras.require("worker")
    from llorch_worker.worker.card.assignment import limit_spinning

    # Before torch loads, because threads that spin here would take a processor from the worker.
    limit_spinning()
    from llorch_worker.bench.jobs.mixed_load import MixedLoad, around
    from llorch_worker.bench.jobs.sandbox import Sandbox
    from llorch_worker.bench.no_op import measure_no_op
    from llorch_worker.bench.queue import Plan, measure_queue
    from llorch_worker.cli.terminal.interrupts import terminable, uninterrupted_exit

    def now(what: str) -> None:
        screen.note(f"measuring {what}")

    load = MixedLoad(max(numbers), around(prompt_tokens), around(new_tokens), seed)
    plan = Plan(settings, load, numbers, single_jobs, passes, threads)
    with terminable(), uninterrupted_exit(Sandbox()) as sandbox:
        if no_op:
            figures = measure_no_op(plan, sandbox, no_op_jobs, now)
        else:
            loading = screen.loading_bar(f"loading {settings.served_name}")
            figures = measure_queue(plan, sandbox, loading, now)
    print_figures(screen, figures)


def _refuse_ignored(given: Mapping[str, str], *, no_op: bool) -> None:
    ignored = [option for name, option in given.items() if name not in _OF_NO_OP]
    if no_op and ignored:
        raise usage_error(f"--no-op runs no model and its own jobs; remove {', '.join(ignored)}")
    if "no_op_jobs" in given and not no_op:
        raise usage_error("--no-op-jobs needs --no-op")
