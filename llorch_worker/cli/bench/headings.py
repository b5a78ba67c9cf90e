"""The lines above every table of ``llorch bench``: on what and by which command it was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.quantities import counted, human_bytes

if TYPE_CHECKING:
    from llorch_worker.bench.instruments.provenance import Provenance


def median_of(passes: int) -> str:
    """``median of 3 passes``, or ``one pass``."""
    return "one pass" if passes == 1 else f"median of {passes} passes"


def spread_title(passes: int) -> tuple[str, ...]:
    """The column of how far passes lie apart; one pass has none."""
    return () if passes == 1 else ("spread",)


def spread_cell(spread: float | None, digits: int = 1) -> tuple[str, ...]:
    """What stands in that column, in percent: ``7.3%``."""
    return () if spread is None else (f"{spread:.{digits}%}",)


def show_provenance(screen: Screen, origin: Provenance) -> None:
    """Print command, machine, versions, threads and seed."""
    from rich.text import Text

    machine = origin.machine
    settings = " ".join(f"{name}={value}" for name, value in origin.environment.items())
    busy = "" if machine.load_1min is None else f", load {machine.load_1min:.1f} when it began"
    lines = [
        f"$ {settings + ' ' if settings else ''}{origin.command}",
        f"  {machine.processor} ({machine.vector_unit}), {counted(machine.usable_cpus, 'CPU')}, "
        f"{human_bytes(machine.memory_bytes)}{busy}",
        f"  {machine.system}; device {machine.device}",
        "  " + ", ".join(f"{name} {version}" for name, version in origin.versions.items()),
        f"  {counted(origin.threads, 'thread')}, seed {origin.seed}",
    ]
    for line in lines:
        screen.out.print(Text(line, "dim"), soft_wrap=True)
    screen.out.print()
