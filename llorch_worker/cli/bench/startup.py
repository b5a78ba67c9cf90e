"""``llorch bench startup``: how long until a model is ready, and what it then holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli import extras
from llorch_worker.cli.bench.headings import median_of, show_provenance
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
from llorch_worker.cli.screen import Screen, human_bytes

if TYPE_CHECKING:
    from llorch_worker.cli.bench.figures.startup import StartupFigures


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

    Beside it, in the same pass, what no loader can do without: reading the file from the disk, and
    writing once to as much new memory as the model then holds. The system's copy of the file is
    dropped before each. Every load is in a process of its own; Python's imports are not in it.
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
    from llorch_worker.cli.bench.figures.startup import measure_startup

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
    show(Text(f"  {median_of(figures.passes)}, by turns\n"))
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("")
    for title in ("bytes", "s", "spread"):
        table.add_column(title, justify="right")
    spread = figures.spread
    for label, size, taken_s, apart in (
        ("read the file from disk", figures.file_bytes, figures.read_s, spread.read),
        ("fill as much new memory", figures.held_bytes, figures.fill_s, spread.fill),
        ("load and first token", None, figures.ready_s, spread.ready),
    ):
        size_text = "" if size is None else human_bytes(size)
        table.add_row(label, size_text, f"{taken_s:.2f}", f"{apart:.0%}")
    show(table)
    show(
        Text(
            f"\nready in {figures.ratio:.2f} times what reading and filling take; the first token "
            f"took {figures.first_token_s:.2f} s of it"
        )
    )
    if figures.resident_bytes is not None:
        apart = figures.resident_bytes / figures.foretold_bytes - 1
        show(
            Text(
                f"resident when ready {human_bytes(figures.resident_bytes)}; llorch inspect "
                f"foretells {human_bytes(figures.foretold_bytes)} ({apart:+.1%})"
            )
        )
    for note in figures.notes:
        show(Text(note, "yellow"))
