"""``llorch bench profile``: which part of a step takes how much of its time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from llorch_worker.bench.instruments.flamegraph import Flamegraph
from llorch_worker.cli.bench.headings import show_provenance
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
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.quantities import counted

if TYPE_CHECKING:
    from llorch_worker.bench.profile import PhaseProfile, ProfileFigures

_SILENT: Final = "99"
_STYLES: Final = {"critical": "bold red", "moderate": "yellow", "minor": "dim"}


def profile(
    model: ModelFileOption = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=1, help="Tokens of each prompt.")
    ] = 128,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Tokens that each request generates.")
    ] = 32,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1024, help="Requests at once.")
    ] = 16,
    threads: ThreadsOption = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=2.0, help="0 is greedy.")
    ] = 0.0,
    flamegraph: Annotated[
        Path | None,
        typer.Option(
            "--flamegraph", metavar="PATH", help="Also sample it with py-spy: out.svg or out.json."
        ),
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    max_step_tokens: MaxStepTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Share a step's time out to the engine's parts, for prefill and for decode.

    By torch's profiler, with a range around each part; every microsecond counts once, and what no
    part accounts for is shown as the rest. Above 10% of the time a part is critical, from 5% on
    moderate, below it minor. The same load runs without the profiler too, so that its own cost
    shows.
    """
    screen = Screen(as_json=as_json)
    sampled = None if flamegraph is None else Flamegraph.at(flamegraph)
    settings = settings_from(
        model=model, device=device, dtype=dtype, max_step_tokens=max_step_tokens
    )
    extras.require("worker")
    # The profiler's own log, of which nothing concerns who reads the table; read when torch loads.
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    from llorch_worker.bench.instruments.passes import Load
    from llorch_worker.bench.profile import ProfilePlan, measure_profile

    plan = ProfilePlan(
        settings=settings,
        load=Load(prompt_tokens, new_tokens, concurrency, temperature, seed),
        threads=threads,
        flamegraph=sampled,
    )
    figures = measure_profile(
        plan,
        screen.loading_bar(f"loading {settings.served_name}"),
        lambda what: screen.note(f"profiling {what}"),
    )
    if as_json:
        screen.document(figures.model_dump(mode="json"))
    else:
        _show(screen, figures)


def _show(screen: Screen, figures: ProfileFigures) -> None:
    from rich.text import Text

    show_provenance(screen, figures.provenance)
    kinds = ", ".join(figures.file_types)
    screen.out.print(Text(f"{figures.model}  ({kinds})", "bold"))
    screen.out.print(
        Text(
            f"  computed in {figures.dtype} on {figures.device}; "
            f"{counted(figures.concurrency, 'prompt')} of "
            f"{counted(figures.prompt_tokens, 'token')}, "
            f"{counted(figures.new_tokens, 'new one')} each"
        )
    )
    for phase in figures.phases:
        _show_phase(screen, phase)
    for note in figures.notes:
        screen.out.print(Text(note, "yellow"))
    if figures.flamegraph is not None:
        screen.out.print(Text(f"flamegraph in {figures.flamegraph}"))


def _show_phase(screen: Screen, phase: PhaseProfile) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    show = screen.out.print
    show()
    critical = [each.component for each in phase.components if each.verdict == "critical"]
    show(
        Text(
            f"{phase.phase}: {counted(phase.steps, 'step')} of {phase.step_ms:,.2f} ms "
            f"({phase.plain_step_ms:,.2f} ms without the profiler)",
            "bold",
        )
    )
    show(Padding(f"above 10%: {', '.join(critical) or 'nothing'}", (0, 0, 0, 2)))
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("part")
    for title in ("share", "ms a step", "calls"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for each in phase.components:
        table.add_row(
            each.component,
            f"{each.share:.1%}",
            f"{each.ms_per_step:,.3f}",
            f"{each.calls_per_step:,.0f}" if each.calls_per_step else "",
            Text(each.verdict, _STYLES[each.verdict]),
        )
    show(table)
    show(
        Text(
            f"  {phase.in_python_share:.1%} in no operator of torch's; "
            f"{phase.elsewhere_share:.1%} in neither matrix products nor attention:\n"
            f"  without any of that a step would be {phase.refactor_bound:.2f} times as fast",
            "dim",
        )
    )
