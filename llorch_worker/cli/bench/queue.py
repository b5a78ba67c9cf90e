"""``llorch bench queue``: what Redis and Celery cost a job and the engine's throughput."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.bench.headings import median_of, show_provenance, spread_cell, spread_title
from llorch_worker.cli.bench.number_list import parse_numbers
from llorch_worker.cli.bench.options import SeedOption, ThreadsOption
from llorch_worker.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    KvCacheBytesOption,
    MaxStepTokensOption,
    ModelFileOption,
    given_options,
    settings_from,
)
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.contract.quantities import counted

if TYPE_CHECKING:
    from llorch_worker.bench.no_op import NoOpFigures
    from llorch_worker.bench.queue import QueueFigures

MOST_JOBS = 10_000
NO_OP_JOBS = 2_000
_OF_NO_OP = frozenset({"no_op", "no_op_jobs", "single_jobs", "concurrency", "passes", "as_json"})
"""Parameters that mean something with --no-op."""


def queue(
    context: typer.Context,
    model: ModelFileOption = None,
    jobs: Annotated[
        str, typer.Option("--jobs", help="Jobs at once: a number, or a list 10,100,1000.")
    ] = "64",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Mean tokens of a prompt.")
    ] = 128,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Mean tokens that a job generates.")
    ] = 32,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1024, help="The most sequences in flight.")
    ] = 16,
    single_jobs: Annotated[
        int, typer.Option("--single-jobs", min=2, help="Jobs timed one at a time.")
    ] = 100,
    passes: Annotated[
        int, typer.Option("--passes", min=1, help="Passes to take the median of.")
    ] = 3,
    no_op: Annotated[
        bool,
        typer.Option("--no-op", help="Only the queue, around a model that computes nothing."),
    ] = False,
    no_op_jobs: Annotated[
        int, typer.Option("--no-op-jobs", min=1, max=100_000, help="Jobs of a --no-op pass.")
    ] = NO_OP_JOBS,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    max_step_tokens: MaxStepTokensOption = None,
    kv_cache_bytes: KvCacheBytesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one load straight through the engine and through Redis, by turns.

    Starts a Redis and a worker of its own; the jobs go through the real client. Lengths vary from
    half the mean to one and a half times. With --no-op the same worker around no model, beside
    stock Celery's thread pool with a task that does nothing.
    """
    screen = Screen(as_json=as_json)
    _refuse_ignored(given_options(context), no_op=no_op)
    numbers = parse_numbers("--jobs", jobs, MOST_JOBS)
    settings = settings_from(
        model=model,
        device=device,
        dtype=dtype,
        max_sequences=concurrency,
        max_step_tokens=max_step_tokens,
        kv_cache_bytes=kv_cache_bytes,
        queue_limit=0,
    )
    extras.require("worker")
    from llorch_worker.worker.card.assignment import limit_spinning

    # Before torch is loaded: what spins here takes a processor from the worker beside it.
    limit_spinning()
    from llorch_worker.bench.instruments.provenance import provenance
    from llorch_worker.bench.jobs.mixed_load import JobLoad, around
    from llorch_worker.bench.jobs.rig import Rig
    from llorch_worker.bench.no_op import measure_no_op
    from llorch_worker.bench.queue import Plan, QueueFigures, measure_queue
    from llorch_worker.cli.terminal.interrupts import terminable, uninterrupted_exit

    def now(what: str) -> None:
        screen.note(f"measuring {what}")

    load = JobLoad(max(numbers), around(prompt_tokens), around(new_tokens), seed)
    plan = Plan(settings, load, numbers, single_jobs, passes, threads)
    measured = alone = None
    with terminable(), uninterrupted_exit(Rig()) as rig:
        if no_op:
            alone = measure_no_op(
                rig,
                jobs=no_op_jobs,
                single_jobs=single_jobs,
                concurrency=concurrency,
                passes=passes,
                now=now,
            )
        else:
            loading = screen.loading_bar(f"loading {settings.served_name}")
            measured = measure_queue(plan, rig, loading, now)
    figures = QueueFigures(
        provenance=measured.provenance if measured else provenance(device="cpu", seed=seed),
        model=settings.model if measured else None,
        dtype=measured.dtype if measured else None,
        concurrency=concurrency,
        prompt_tokens=load.prompt_tokens,
        new_tokens=load.new_tokens,
        passes=passes,
        rows=measured.rows if measured else (),
        single=measured.single if measured else None,
        no_op=alone,
    )
    if as_json:
        screen.document(figures.model_dump(mode="json"))
    else:
        _show(screen, figures)


def _refuse_ignored(given: Mapping[str, str], *, no_op: bool) -> None:
    ignored = [option for name, option in given.items() if name not in _OF_NO_OP]
    if no_op and ignored:
        raise usage_error(
            f"--no-op runs no model and jobs of its own: leave out {', '.join(ignored)}"
        )
    if "no_op_jobs" in given and not no_op:
        raise usage_error("--no-op-jobs says how many jobs --no-op runs: give both")


def _show(screen: Screen, figures: QueueFigures) -> None:
    show_provenance(screen, figures.provenance)
    if figures.no_op is not None:
        _show_no_op(screen, figures.no_op, figures.passes)
    else:
        _show_loads(screen, figures)


def _show_loads(screen: Screen, figures: QueueFigures) -> None:
    from rich.table import Table
    from rich.text import Text

    show = screen.out.print
    show(Text(f"{figures.model} as {figures.dtype}, straight and through Redis", "bold"))
    prompts, new = figures.prompt_tokens, figures.new_tokens
    show(
        Text(
            f"  prompts of {prompts[0]} to {prompts[1]} tokens, {new[0]} to {new[1]} new ones, "
            f"{counted(figures.concurrency, 'sequence')} at once; {median_of(figures.passes)}\n"
        )
    )
    table = Table("jobs", "", box=None, header_style="dim", pad_edge=False)
    for title in (
        "jobs/s",
        "tokens/s",
        *spread_title(figures.passes),
        "share",
        "CPU",
        "delivery p50",
        "p95, ms",
    ):
        table.add_column(title, justify="right")
    for row in figures.rows:
        for name, way in (("straight", row.straight), ("queued", row.queued)):
            last = name == "queued"
            table.add_row(
                "" if last else f"{row.jobs:,}",
                name,
                f"{way.jobs_per_s:.2f}",
                f"{way.tokens_per_s:,.1f}",
                *spread_cell(way.spread),
                f"{row.share:.1%}" if last else "",
                f"{row.beside_model:.1%}" if last else "",
                f"{row.delivery_ms.p50:.2f}" if last else "",
                f"{row.delivery_ms.p95:.2f}" if last else "",
            )
    show(table)
    show(Text("  CPU: what the queue takes of all processors, without the model's threads"))
    single = figures.single
    if single is None:
        return
    table = Table(
        "one job at a time", box=None, header_style="dim", pad_edge=False, title_justify="left"
    )
    for title in ("p50, ms", "p95"):
        table.add_column(title, justify="right")
    for name, p50, p95 in (
        ("straight", single.straight_ms.p50, single.straight_ms.p95),
        ("queued", single.queued_ms.p50, single.queued_ms.p95),
        ("the queue adds", single.added_p50_ms, single.added_p95_ms),
    ):
        table.add_row(name, f"{p50:.2f}", f"{p95:.2f}")
    show()
    show(table)
    show(
        Text(f"  submit to result less the engine's own time, {single.queued_ms.samples} jobs each")
    )


def _show_no_op(screen: Screen, figures: NoOpFigures, passes: int) -> None:
    from rich.table import Table
    from rich.text import Text

    show = screen.out.print
    show(
        Text(
            f"{counted(figures.jobs, 'job')} doing nothing, {figures.concurrency} at once", "bold"
        ),
    )
    table = Table("", box=None, header_style="dim", pad_edge=False)
    for title in (
        "sent, jobs/s",
        "run, jobs/s",
        *spread_title(passes),
        "alone p50, ms",
        "p95, ms",
    ):
        table.add_column(title, justify="right")
    for name, rates, alone in (
        ("llorch", figures.ours, figures.ours_alone_ms),
        ("stock Celery", figures.stock, figures.stock_alone_ms),
    ):
        table.add_row(
            name,
            f"{rates.sent_per_s:,.0f}",
            f"{rates.run_per_s:,.0f}",
            *spread_cell(rates.spread),
            f"{alone.p50:.2f}",
            f"{alone.p95:.2f}",
        )
    show(table)
    show(
        Text(
            f"\nllorch runs {figures.ratio:.2f} times as many jobs a second\n"
            "alone: one job at a time, from submission to result, "
            f"{counted(figures.ours_alone_ms.samples, 'job')} each"
        )
    )
