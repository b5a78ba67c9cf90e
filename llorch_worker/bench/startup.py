"""``llorch bench startup``: a load beside the reading of its file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from rich.console import RenderableType

from llorch_worker.bench.instruments.fresh_load import FreshLoad, drop_cached, load_afresh, read_s
from llorch_worker.bench.instruments.percentiles import spread_of
from llorch_worker.bench.instruments.provenance import Figures, provenance
from llorch_worker.bench.plan import Plan
from llorch_worker.bench.tables import median_of, remark, table, title
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.weights.contents import file_bytes

FROM_DISK = 0.9
"""A pass counts as a read from disk if at least this share of the file comes from there."""


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
    read_s: float
    """Reading all files with one thread; median over the passes, as all spans of time here."""
    read_spread: float | None
    """Largest minus smallest, as a share of the median; None for one pass."""
    ready_s: float
    """From the file to the first token."""
    ready_spread: float | None
    first_token_s: float
    ratio: float
    """``ready_s`` as a multiple of ``read_s``: median over the passes."""
    resident_bytes: int | None
    """Resident memory of the process that loaded; None on a card, which holds the model itself."""
    planned_bytes: int
    """Predicted without the KV blocks of a CPU, which take memory as they are used."""
    notes: tuple[str, ...]

    def parts(self) -> Iterator[RenderableType]:
        yield title(f"{self.model} as {self.dtype} on {self.device}")
        yield (
            f"  {counted(self.max_sequences, 'sequence')} of up to {self.max_context:,} "
            f"tokens; {median_of(self.passes)}; reads and loads alternate\n"
        )
        file, held = human_bytes(self.file_bytes), human_bytes(self.held_bytes)
        yield table(
            [("", ""), ("bytes", ""), ("s", ".3g"), ("spread", ".0%")],
            [
                ("read the file", file, self.read_s, self.read_spread),
                ("load and first token", held, self.ready_s, self.ready_spread),
            ],
        )
        yield (
            f"\nready in {self.ratio:.2f} times what the read takes; the first token is "
            f"{self.first_token_s:.2g} s of the load"
        )
        if self.resident_bytes is not None:
            apart = self.resident_bytes / self.planned_bytes - 1
            yield (
                f"resident when ready {human_bytes(self.resident_bytes)}, predicted "
                f"{human_bytes(self.planned_bytes)} ({apart:+.1%})"
            )
        yield from map(remark, self.notes)


def measure_startup(plan: Plan) -> StartupFigures:
    """Run passes of a read and a load, after one load that compiles the kernels.

    Raises:
        CommandError: the system cannot drop a file from its page cache, the model does not fit
            with these settings, or a load failed.
        ModelLoadFailed: as ``plan_load`` does.
    """
    settings = plan.settings
    fitting = plan_load(settings.model, settings.engine_options)
    if fitting.misfit:
        raise CommandError(
            "OUT_OF_MEMORY",
            f"{settings.model} does not fit on {fitting.device} with these settings; "
            "llorch inspect shows what it needs and what is free",
        )
    files = fitting.checkpoint.files
    drop_cached(files)
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    origin = provenance(device=str(fitting.device), seed=0)
    plan.now("a first load, which does not count")
    load_afresh(settings, plan.threads)
    reads_s: list[float] = []
    loads: list[FreshLoad] = []
    for number in range(plan.passes):
        plan.now(f"pass {number + 1} of {plan.passes}")
        drop_cached(files)
        reads_s.append(read_s(files))
        drop_cached(files)
        loads.append(load_afresh(settings, plan.threads))
    size, last = file_bytes(fitting.checkpoint), loads[-1]
    return StartupFigures(
        provenance=origin,
        model=settings.model,
        device=last.device,
        dtype=last.dtype,
        max_sequences=fitting.options.sequences,
        max_context=fitting.shape.max_context,
        passes=plan.passes,
        file_bytes=size,
        held_bytes=last.held_bytes,
        read_s=median(reads_s),
        read_spread=spread_of(reads_s),
        ready_s=median(load.ready_s for load in loads),
        ready_spread=spread_of([load.ready_s for load in loads]),
        first_token_s=median(load.first_token_s for load in loads),
        ratio=median(load.ready_s / s for load, s in zip(loads, reads_s, strict=True)),
        resident_bytes=None
        if fitting.device.type == "cuda"
        else round(median(load.resident_bytes for load in loads)),
        planned_bytes=last.planned_bytes,
        notes=from_disk_notes(size, [load.from_disk_bytes for load in loads]),
    )


def from_disk_notes(file_bytes: int, from_disk_bytes: Sequence[int]) -> tuple[str, ...]:
    """A note if files may not have come from a disk; takes the bytes of each pass."""
    share = min(from_disk_bytes) / file_bytes
    if share >= FROM_DISK:
        return ()
    return (
        f"in one pass only {share:.0%} of the file came from a disk: something else keeps the rest "
        "in memory",
    )
