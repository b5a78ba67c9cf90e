"""``llorch bench overhead``: what the engine adds to a model's own time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.bench.headings import show_provenance
from llorch_worker.cli.bench.options import SeedOption, ThreadsOption
from llorch_worker.cli.options import DeviceOption, DtypeOption, JsonOption, settings_from
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.quantities import counted

if TYPE_CHECKING:
    from llorch_worker.bench.overhead import OverheadFigures


def overhead(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH", help="Also as a share of this model's steps."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1024, help="Sequences at once.")
    ] = 16,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Decode steps of a row.")] = 200,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a decode step outside the model: scheduler, sampler, detokeniser, events.

    Around a model that computes nothing, at two sizes of vocabulary; with --model around that one
    too.
    """
    screen = Screen(as_json=as_json)
    settings = settings_from(model=model, device=device, dtype=dtype) if model else None
    extras.require("worker")
    import torch

    from llorch_worker.bench.overhead import measure_overhead

    if threads is not None:
        torch.set_num_threads(threads)
    figures = measure_overhead(
        sequences=concurrency,
        steps=steps,
        seed=seed,
        settings=settings,
        progress=screen.loading_bar("loading"),
    )
    if as_json:
        screen.document(figures.model_dump(mode="json"))
    else:
        _show(screen, figures)


def _show(screen: Screen, figures: OverheadFigures) -> None:
    from rich.table import Table
    from rich.text import Text

    show_provenance(screen, figures.provenance)
    screen.out.print(
        Text(f"A decode step of {counted(figures.sequences, 'sequence')} outside the model", "bold")
    )
    table = Table("model", "vocabulary", "sampling", box=None, header_style="dim", pad_edge=False)
    of_a_step = any(row.share is not None for row in figures.rows)
    for title in ("ms p50", "p95", "p99", "mean", *(("of a step",) if of_a_step else ())):
        table.add_column(title, justify="right")
    for row in figures.rows:
        table.add_row(
            row.model,
            f"{row.vocab_size:,}",
            row.sampling,
            *(f"{ms:.3f}" for ms in row.outside_model_ms.in_order),
            f"{row.outside_model_mean_ms:.3f}",
            *(("" if row.share is None else f"{row.share:.1%}",) if of_a_step else ()),
        )
    screen.out.print(table)
