"""``llorch bench startup``: how long until a model is ready, and what it then holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.bench.headings import median_of, show_provenance, spread_cell, spread_title
from llorch_worker.cli.bench.options import ThreadsOption
from llorch_worker.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    KvCacheBytesOption,
    MaxContextOption,
    MaxSequencesOption,
    ModelFileOption,
    settings_from,
)
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.quantities import counted, human_bytes

if TYPE_CHECKING:
    from llorch_worker.bench.startup import StartupFigures


def startup(
    model: ModelFileOption = None,
    max_sequences: MaxSequencesOption = None,
    max_context: MaxContextOption = None,
    kv_cache_bytes: KvCacheBytesOption = None,
    passes: Annotated[
        int, typer.Option("--passes", min=1, help="Passes to take the median of.")
    ] = 4,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how long a model takes from its file to its first token.

    Beside it, by turns, as a yardstick: reading the file from the disk with one thread, and writing
    once to as much new memory as the model then holds. A load that overlaps the two can beat their
    sum. The system's copy of the file is dropped before each. Every load and write is in a process
    of its own; its time begins when torch is imported.
    """
    screen = Screen(as_json=as_json)
    settings = settings_from(
        model=model,
        device=device,
        dtype=dtype,
        max_sequences=max_sequences,
        max_context=max_context,
        kv_cache_bytes=kv_cache_bytes,
    )
    extras.require("worker")
    from llorch_worker.bench.startup import measure_startup
    from llorch_worker.cli.terminal.interrupts import terminable

    with terminable():
        figures = measure_startup(
            settings,
            passes=passes,
            threads=threads,
            now=lambda what: screen.note(f"measuring {what}"),
        )
    if as_json:
        screen.document(figures.model_dump(mode="json"))
    else:
        _show(screen, figures)


def _show(screen: Screen, figures: StartupFigures) -> None:
    from rich.table import Table
    from rich.text import Text

    show_provenance(screen, figures.provenance)
    show = screen.out.print
    show(Text(f"{figures.model} as {figures.dtype} on {figures.device}", "bold"))
    show(
        Text(
            f"  {counted(figures.max_sequences, 'sequence')} of up to {figures.max_context:,} "
            f"tokens; {median_of(figures.passes)}, by turns\n"
        )
    )
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("")
    for title in ("bytes", "s", *spread_title(figures.passes)):
        table.add_column(title, justify="right")
    rows = [("read the file, one thread", human_bytes(figures.file_bytes), figures.read)]
    if figures.write is not None:
        rows.append(
            ("write once what the model holds", human_bytes(figures.held_bytes), figures.write)
        )
    rows.append(("load and first token", "", figures.ready))
    for label, size, span in rows:
        table.add_row(label, size, f"{span.median_s:.3g}", *spread_cell(span.spread, digits=0))
    show(table)
    yardstick = "the read takes" if figures.write is None else "read and write take together"
    show(
        Text(
            f"\nready in {figures.ratio:.2f} times what {yardstick}; the first token is "
            f"{figures.first_token_s:.2g} s of the load"
        )
    )
    if figures.resident_bytes is not None:
        apart = figures.resident_bytes / figures.foretold_bytes - 1
        show(
            Text(
                f"resident when ready {human_bytes(figures.resident_bytes)}, foretold "
                f"{human_bytes(figures.foretold_bytes)} ({apart:+.1%})"
            )
        )
    for note in figures.notes:
        show(Text(note, "yellow"))
