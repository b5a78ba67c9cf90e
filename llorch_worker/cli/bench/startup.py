"""``llorch bench startup``: the time until a model is ready, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from llorch_worker.cli.bench import parameters
from llorch_worker.cli.bench.output import median_of, print_figures, remark, table, title
from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llorch_worker.bench.startup import StartupFigures


@settings_options("model", "max_sequences", "max_context", "kv_cache_bytes", "device", "dtype")
def startup(
    settings: Settings,
    passes: parameters.PassesOption = 4,
    threads: parameters.ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how long a model takes from its file to its first token.

    The yardstick is one thread that reads the file from disk and writes once to as much new memory
    as the model holds. A load that overlaps the two can beat their sum. The file is dropped from
    the page cache before each read and load. Every load and write runs in its own process; its time
    begins when torch is imported.
    """
    screen = Screen(as_json=as_json)
    extras.require("worker")
    from llorch_worker.bench.startup import measure_startup
    from llorch_worker.cli.terminal.interrupts import terminable

    with terminable():
        figures = measure_startup(
            settings, passes, threads, lambda what: screen.note(f"measuring {what}")
        )
    print_figures(screen, figures, _lay_out)


def _lay_out(figures: StartupFigures) -> Iterator[RenderableType]:
    yield title(f"{figures.model} as {figures.dtype} on {figures.device}")
    yield (
        f"  {counted(figures.max_sequences, 'sequence')} of up to {figures.max_context:,} "
        f"tokens; {median_of(figures.passes)}; reads, writes and loads alternate\n"
    )
    spans = [("read the file, one thread", human_bytes(figures.file_bytes), figures.read)]
    yardstick = "the read takes"
    if figures.write is not None:
        held = human_bytes(figures.held_bytes)
        spans.append(("write once what the model holds", held, figures.write))
        yardstick = "read and write take together"
    spans.append(("load and first token", "", figures.ready))
    yield table(
        [("", ""), ("bytes", ""), ("s", ".3g"), ("spread", ".0%")],
        [(label, size, span.median_s, span.spread) for label, size, span in spans],
    )
    yield (
        f"\nready in {figures.ratio:.2f} times what {yardstick}; the first token is "
        f"{figures.first_token_s:.2g} s of the load"
    )
    if figures.resident_bytes is not None:
        apart = figures.resident_bytes / figures.foretold_bytes - 1
        yield (
            f"resident when ready {human_bytes(figures.resident_bytes)}, predicted "
            f"{human_bytes(figures.foretold_bytes)} ({apart:+.1%})"
        )
    yield from map(remark, figures.notes)
