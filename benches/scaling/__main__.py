"""``python -m benches.scaling``: whether cost grows linearly with the queue and the context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.bench.headings import median_of, show_provenance, spread_cell, spread_title
from llorch_worker.cli.bench.number_list import parse_numbers
from llorch_worker.cli.bench.options import SeedOption, ThreadsOption
from llorch_worker.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaxStepTokensOption,
    ModelFileOption,
    settings_from,
)
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.command_line import command_line, run
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.contract.quantities import counted

if TYPE_CHECKING:
    from benches.scaling.measures import ScalingFigures

MOST_QUEUED = 100_000
MOST_TOKENS = 1_000_000


def scaling(
    model: ModelFileOption = None,
    queued: Annotated[
        str, typer.Option("--queued", help="Requests at once: a number, or a list.")
    ] = "10,100,1000",
    contexts: Annotated[
        str, typer.Option("--contexts", help="Tokens that one request holds at its end.")
    ] = "128,512,1024,2048",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Of each queued request.")
    ] = 16,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=2, help="Tokens that each request generates.")
    ] = 16,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1024, help="The most sequences in flight.")
    ] = 16,
    passes: Annotated[
        int, typer.Option("--passes", min=1, help="Passes to take the median of.")
    ] = 3,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    max_step_tokens: MaxStepTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what a token costs as more requests wait, and as one request's context grows.

    Straight through the engine; `bench queue --jobs 10,100,1000` does the first through Redis.
    """
    screen = Screen(as_json=as_json)
    numbers = parse_numbers("--queued", queued, MOST_QUEUED)
    lengths = parse_numbers("--contexts", contexts, MOST_TOKENS)
    if min(lengths) <= new_tokens:
        raise usage_error(f"--contexts must each be more than --new-tokens, {new_tokens}")
    settings = settings_from(
        model=model, device=device, dtype=dtype, max_step_tokens=max_step_tokens
    )
    extras.require("worker")
    from benches.scaling.measures import Plan, measure_scaling

    plan = Plan(
        settings=settings,
        queued=numbers,
        contexts=lengths,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        passes=passes,
        threads=threads,
        seed=seed,
    )
    figures = measure_scaling(
        plan,
        screen.loading_bar(f"loading {settings.served_name}"),
        lambda what: screen.note(f"measuring {what}"),
    )
    if as_json:
        screen.document(figures.model_dump(mode="json"))
    else:
        _show(screen, figures)


def _show(screen: Screen, figures: ScalingFigures) -> None:
    from rich.table import Table
    from rich.text import Text

    show_provenance(screen, figures.provenance)
    show = screen.out.print
    show(Text(f"{figures.model} as {figures.dtype}; {median_of(figures.passes)}", "bold"))
    show(
        Text(
            f"  queued requests: prompts of {counted(figures.prompt_tokens, 'token')}, "
            f"{counted(figures.new_tokens, 'new one')}, "
            f"{counted(figures.concurrency, 'sequence')} at once\n"
        )
    )
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("queued", "tokens/s", *spread_title(figures.passes), "cost of a token"):
        table.add_column(title, justify="right")
    for row in figures.queued:
        table.add_row(
            f"{row.queued:,}",
            f"{row.tokens_per_s:,.1f}",
            *spread_cell(row.spread),
            f"{row.cost:.2f}x",
        )
    show(table)
    show()
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("context", "prefill, tokens/s", "cost", "decode, tokens/s", "cost"):
        table.add_column(title, justify="right")
    for each in figures.contexts:
        table.add_row(
            f"{each.context_tokens:,}",
            f"{each.prefill_tokens_per_s:,.1f}",
            f"{each.prefill_cost:.2f}x",
            f"{each.decode_tokens_per_s:,.1f}",
            f"{each.decode_cost:.2f}x",
        )
    show(table)


if __name__ == "__main__":
    app = command_line()
    app.command()(scaling)
    raise SystemExit(run(app, "python -m benches.scaling"))
