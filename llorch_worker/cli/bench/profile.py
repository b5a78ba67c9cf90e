"""``llorch bench profile``: the share of each part of the engine in a step's time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from llorch_worker.bench.instruments.flamegraph import Flamegraph
from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import print_figures, remark, table, title
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llorch_worker.bench.profile import PhaseProfile, ProfileFigures

_SILENT: Final = "99"
_STYLES: Final = {"critical": "bold red", "moderate": "yellow", "minor": "dim"}


@settings_options("model", "device", "dtype", "max_step_tokens")
def profile(
    settings: Settings,
    prompt_tokens: parameters.PromptTokensOption = 128,
    new_tokens: parameters.NewTokensOption = 32,
    concurrency: parameters.InFlightOption = 16,
    threads: parameters.ThreadsOption = None,
    temperature: parameters.TemperatureOption = 0.0,
    flamegraph: Annotated[
        Path | None,
        typer.Option(
            "--flamegraph", metavar="PATH", help="Also sample with py-spy: out.svg or out.json."
        ),
    ] = None,
    seed: parameters.SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show how much of a step each part of the engine takes, in prefill and in decode.

    torch's profiler measures a range around each part. Every microsecond counts once; "rest" is
    the time outside all parts. A part is critical above 10% of the time, moderate from 5% and minor
    below. The same load also runs without the profiler, to show the cost of profiling.
    """
    screen = Screen(as_json=as_json)
    sampled = None if flamegraph is None else Flamegraph.at(flamegraph)
    extras.require("worker")
    # Silences the profiler's own log; torch reads the variable when it loads.
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    from llorch_worker.bench.instruments.timed_load import Load
    from llorch_worker.bench.profile import measure_profile

    figures = measure_profile(
        settings,
        Load(prompt_tokens, new_tokens, concurrency, temperature, seed),
        threads,
        sampled,
        screen.loading_bar(f"loading {settings.served_name}"),
        lambda what: screen.note(f"profiling {what}"),
    )
    print_figures(screen, figures, _lay_out)


def _lay_out(figures: ProfileFigures) -> Iterator[RenderableType]:
    yield title(f"{figures.model}  ({', '.join(figures.file_types)})")
    yield (
        f"  computed in {figures.dtype} on {figures.device}; "
        f"{counted(figures.concurrency, 'prompt')} of {counted(figures.prompt_tokens, 'token')}, "
        f"{counted(figures.new_tokens, 'new one')} each"
    )
    for phase in figures.phases:
        yield from _lay_out_phase(phase)
    yield from map(remark, figures.notes)
    if figures.flamegraph is not None:
        yield f"flamegraph in {figures.flamegraph}"


def _lay_out_phase(phase: PhaseProfile) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    critical = [each.component for each in phase.components if each.verdict == "critical"]
    yield title(
        f"\n{phase.phase}: {counted(phase.steps, 'step')} of {phase.step_ms:,.2f} ms "
        f"({phase.plain_step_ms:,.2f} ms without the profiler)"
    )
    yield Padding(f"above 10%: {', '.join(critical) or 'nothing'}", (0, 0, 0, 2))
    yield table(
        [("part", ""), ("share", ".1%"), ("ms a step", ",.3f"), ("calls", ",.0f"), ("verdict", "")],
        [
            (
                *(each.component.value, each.share, each.ms_per_step),
                *(each.calls_per_step or None, Text(each.verdict, _STYLES[each.verdict])),
            )
            for each in phase.components
        ],
    )
    yield Text(
        f"  {phase.in_python_share:.1%} of the time outside torch's operators; "
        f"{phase.elsewhere_share:.1%} outside matrix products\n  and attention: without that, "
        f"a step would be {phase.refactor_bound:.2f} times as fast",
        "dim",
    )
