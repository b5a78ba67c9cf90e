"""``python -m benches.scaling``: does cost grow linearly with the queue and the context?"""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.command_line import command_line, run
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.settings import Settings

MOST_QUEUED = 100_000
MOST_TOKENS = 1_000_000


@settings_options("model", "device", "dtype", "max_step_tokens")
def scaling(
    settings: Settings,
    queued: Annotated[
        str, typer.Option("--queued", help="Requests at once: a number, or a list.")
    ] = "10,100,1000",
    contexts: Annotated[
        str, typer.Option("--contexts", help="Tokens that one request holds at its end.")
    ] = "128,512,1024,2048",
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Prompt tokens of each queued request.")
    ] = 16,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=2, help="Tokens that each request generates.")
    ] = 16,
    concurrency: parameters.InFlightOption = 16,
    passes: parameters.PassesOption = 3,
    threads: parameters.ThreadsOption = None,
    seed: parameters.SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure what a token costs as more requests wait, and as one request's context grows.

    Requests go straight to the engine; `llorch bench queue --jobs 10,100,1000` goes through Redis.
    """
    screen = Screen(as_json=as_json)
    numbers = parameters.parse_numbers("--queued", queued, MOST_QUEUED)
    lengths = parameters.parse_numbers("--contexts", contexts, MOST_TOKENS)
    if min(lengths) <= new_tokens:
        raise usage_error(f"each of --contexts must be more than --new-tokens, {new_tokens}")
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
    print_figures(screen, figures)


if __name__ == "__main__":
    app = command_line()
    app.command()(scaling)
    raise SystemExit(run(app, "python -m benches.scaling"))
