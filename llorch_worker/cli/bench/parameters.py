"""Options that several benchmarks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import usage_error
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.bench.plan import Plan

ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=4096, help="torch's CPU threads (default: its own)."),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of prompts and samples.")]
PassesOption = Annotated[int, typer.Option("--passes", min=1, help="Passes to take the median of.")]
PromptTokensOption = Annotated[
    int, typer.Option("--prompt-tokens", min=1, help="Tokens of each prompt.")
]
NewTokensOption = Annotated[
    int, typer.Option("--new-tokens", min=1, help="Tokens that each request generates.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, max=2.0, help="0 is greedy.")
]
InFlightOption = Annotated[
    int, typer.Option("--concurrency", min=1, max=1024, help="The most sequences in flight.")
]


def parse_numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """``"1,8,16"`` as numbers, each once; raises CommandError unless all are 1 to ``most``."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= most for number in numbers):
        raise usage_error(
            f"{option} must be numbers from 1 to {most}, such as 16 or 1,8,16 (got {text[:40]!r})"
        )
    return numbers


def plan(screen: Screen, settings: Settings, passes: int, threads: int | None) -> Plan:
    """A plan that shows its progress on ``screen``."""
    from llorch_worker.bench.plan import Plan

    loading = screen.loading_bar(f"loading {settings.served_name}")
    return Plan(settings, passes, threads, lambda what: screen.note(f"measuring {what}"), loading)
