"""``llorch bench startup``: a load compared with the reads and writes that it consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import RenderableType

from llorch_worker.bench.instruments.disk import bytes_from_disk, drop_cached, read_s
from llorch_worker.bench.instruments.fresh_load import FreshLoad, load_afresh, write_afresh
from llorch_worker.bench.instruments.percentiles import spread_of
from llorch_worker.bench.instruments.provenance import Figures, Frozen, provenance
from llorch_worker.bench.tables import median_of, remark, table, title
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.settings import Settings
from llorch_worker.weights.contents import file_bytes

FROM_DISK = 0.9
"""A pass counts as a read from disk if at least this share of the file comes from there."""


class Span(Frozen):
    """Seconds: the median of the passes, and their spread (largest minus smallest) as a share of
    it; None for one pass."""

    median_s: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Span:
        return cls(median_s=median(values), spread=spread_of(values))


class StartupFigures(Figures):
    """The document of ``llorch bench startup --json``."""

    model: Path
    device: str
    dtype: str
    max_sequences: int
    max_context: int
    passes: int
    file_bytes: int
    held_bytes: int
    """Held by weights and tables, and on a card by KV blocks."""
    read: Span
    """Reading all files with one thread."""
    write: Span | None
    """Writing once to each byte of as much new memory as the model holds; None on a card."""
    ready: Span
    """From the file to the first token."""
    first_token_s: float
    ratio: float
    """``ready`` as a multiple of read plus write: median over the passes."""
    resident_bytes: int | None
    """Resident memory of the process that loaded; None on a card, which holds the model itself."""
    foretold_bytes: int
    """Predicted without the KV blocks of a CPU, which take memory as they are used."""
    notes: tuple[str, ...]

    def parts(self) -> Iterator[RenderableType]:
        yield title(f"{self.model} as {self.dtype} on {self.device}")
        yield (
            f"  {counted(self.max_sequences, 'sequence')} of up to {self.max_context:,} "
            f"tokens; {median_of(self.passes)}; reads, writes and loads alternate\n"
        )
        spans = [("read the file, one thread", human_bytes(self.file_bytes), self.read)]
        yardstick = "the read takes"
        if self.write is not None:
            held = human_bytes(self.held_bytes)
            spans.append(("write once what the load writes", held, self.write))
            yardstick = "read and write take together"
        spans.append(("load and first token", "", self.ready))
        yield table(
            [("", ""), ("bytes", ""), ("s", ".3g"), ("spread", ".0%")],
            [(label, size, span.median_s, span.spread) for label, size, span in spans],
        )
        yield (
            f"\nready in {self.ratio:.2f} times what {yardstick}; the first token is "
            f"{self.first_token_s:.2g} s of the load"
        )
        if self.resident_bytes is not None:
            apart = self.resident_bytes / self.foretold_bytes - 1
            yield (
                f"resident when ready {human_bytes(self.resident_bytes)}, predicted "
                f"{human_bytes(self.foretold_bytes)} ({apart:+.1%})"
            )
        yield from map(remark, self.notes)


@dataclass(frozen=True)
class _Pass:
    read_s: float
    write_s: float
    load: FreshLoad
    from_disk: float | None
    """Share of the file that came from a disk; None if the system does not report it."""

    @property
    def ready_s(self) -> float:
        return self.load.load_s + self.load.first_token_s


def measure_startup(
    settings: Settings, passes: int, threads: int | None, now: Callable[[str], None]
) -> StartupFigures:
    """Run passes of a read, a write and a load, after one load that compiles the kernels.

    Raises:
        CommandError: the system cannot drop a file from its page cache, the model does not fit
            with these settings, or a load failed.
        ModelLoadFailed: as ``plan_load`` does.
    """
    plan = plan_load(settings.model, **settings.engine_options)
    if plan.misfit:
        raise CommandError(
            "OUT_OF_MEMORY",
            f"{settings.model} does not fit on {plan.device} with these settings; "
            "llorch inspect shows what it needs and what is free",
        )
    files = plan.checkpoint.files
    size = file_bytes(plan.checkpoint)
    drop_cached(files)
    if threads is not None:
        torch.set_num_threads(threads)
    on_card = plan.device.type == "cuda"
    origin = provenance(device=str(plan.device), seed=0)
    now("a first load, which does not count")
    first = load_afresh(settings, threads)
    # On a card, new memory costs nothing.
    written_bytes = 0 if on_card else first.held_bytes
    done: list[_Pass] = []
    for number in range(passes):
        now(f"pass {number + 1} of {passes}")
        done.append(_pass(settings, files, size, written_bytes, threads))
    return StartupFigures(
        provenance=origin,
        model=settings.model,
        device=first.device,
        dtype=first.dtype,
        max_sequences=plan.max_sequences,
        max_context=plan.shape.max_context,
        passes=passes,
        file_bytes=size,
        held_bytes=first.held_bytes,
        read=Span.of([each.read_s for each in done]),
        write=None if on_card else Span.of([each.write_s for each in done]),
        ready=Span.of([each.ready_s for each in done]),
        first_token_s=median(each.load.first_token_s for each in done),
        ratio=median(each.ready_s / (each.read_s + each.write_s) for each in done),
        resident_bytes=None
        if on_card
        else round(median(each.load.resident_bytes for each in done)),
        foretold_bytes=first.foretold_bytes,
        notes=from_disk_notes([each.from_disk for each in done if each.from_disk is not None]),
    )


def _pass(
    settings: Settings,
    files: Sequence[Path],
    file_bytes: int,
    written_bytes: int,
    threads: int | None,
) -> _Pass:
    drop_cached(files)
    before = bytes_from_disk()
    reading_s = read_s(files)
    after = bytes_from_disk()
    drop_cached(files)
    writing_s = write_afresh(written_bytes, threads) if written_bytes else 0.0
    load = load_afresh(settings, threads)
    from_disk = None
    if before is not None and after is not None and load.from_disk_bytes is not None:
        from_disk = min(after - before, load.from_disk_bytes) / file_bytes
    return _Pass(reading_s, writing_s, load, from_disk)


def from_disk_notes(shares_from_disk: Sequence[float]) -> tuple[str, ...]:
    """Notes if files may not have come from a disk; takes one share for each pass."""
    if not shares_from_disk:
        return ("this system does not report how much of the file came from a disk",)
    if min(shares_from_disk) >= FROM_DISK:
        return ()
    return (
        f"in one pass only {min(shares_from_disk):.0%} of the file came from a disk: something "
        "else keeps the rest in memory",
    )
