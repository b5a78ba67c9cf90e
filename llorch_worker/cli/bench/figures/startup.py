"""``llorch bench startup``'s measuring: a load beside what no load can do without."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from pydantic import BaseModel, ConfigDict

from llorch_worker.cli.bench.measuring.provenance import Provenance, provenance
from llorch_worker.cli.errors import CommandError
from llorch_worker.cli.model_report import report
from llorch_worker.cli.screen import human_bytes
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine.placement import resolve_device
from llorch_worker.kernels.arena import Arena
from llorch_worker.settings import Settings
from llorch_worker.weights import open_checkpoint

READ_BYTES = 4 * 2**20
FROM_DISK = 0.9
"""What comes from the disk, as a share of the file, for a read to count as one from there."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Spread(_Frozen):
    """Largest less smallest of the passes, as a share of the median."""

    read: float
    fill: float
    ready: float


class StartupFigures(_Frozen):
    """The document of ``llorch bench startup --json``; durations are medians over the passes."""

    provenance: Provenance
    model: Path
    device: str
    dtype: str
    passes: int
    file_bytes: int
    held_bytes: int
    """Of weights, KV cache and tables."""
    read_s: float
    """Of all files, one after another, by one thread."""
    fill_s: float
    """Of one write to each byte of as much new memory as the model holds."""
    ready_s: float
    """From the file to the first token."""
    first_token_s: float
    ratio: float
    """``ready_s`` against ``read_s`` + ``fill_s``: median over the passes."""
    spread: Spread
    resident_bytes: int | None
    """Of the loading process when it was ready; None on a card, which holds the model itself."""
    foretold_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Ready:
    """What a process that loaded the model tells."""

    load_s: float
    first_token_s: float
    held_bytes: int
    resident_bytes: int
    device: str
    dtype: str


@dataclass(frozen=True)
class _Pass:
    read_s: float
    fill_s: float
    ready: _Ready

    @property
    def ready_s(self) -> float:
        return self.ready.load_s + self.ready.first_token_s

    @property
    def ratio(self) -> float:
        return self.ready_s / (self.read_s + self.fill_s)


def measure_startup(
    settings: Settings, *, passes: int, threads: int | None, now: Callable[[str], None]
) -> StartupFigures:
    """Passes of a read, a fill and a load, after a load that compiles what is not compiled yet.

    Raises:
        CommandError: the system cannot drop its copy of a file.
        LlorchError: as ``report`` and ``Engine.load`` do.
    """
    found = report(settings)
    files = open_checkpoint(settings.model).files
    if threads is not None:
        torch.set_num_threads(threads)
    device = resolve_device(settings.device)
    now("a first load, which does not count")
    held_bytes = _ready_elsewhere(settings, threads).held_bytes
    done: list[_Pass] = []
    from_disk: list[float] = []
    for number in range(passes):
        now(f"pass {number + 1} of {passes}")
        read_s, share = _read(files)
        from_disk.append(share)
        _drop(files)
        # Each first every other time: the second gets memory that the first has just given back,
        # which a virtual machine's host need not find for it again.
        if number % 2:
            ready = _ready_elsewhere(settings, threads)
            fill_s = _fill(held_bytes, device)
        else:
            fill_s = _fill(held_bytes, device)
            ready = _ready_elsewhere(settings, threads)
        done.append(_Pass(read_s, fill_s, ready))
    first = done[0].ready
    return StartupFigures(
        provenance=provenance(device=first.device, seed=0),
        model=settings.model,
        device=first.device,
        dtype=first.dtype,
        passes=passes,
        file_bytes=found.file_bytes,
        held_bytes=held_bytes,
        read_s=median(each.read_s for each in done),
        fill_s=median(each.fill_s for each in done),
        ready_s=median(each.ready_s for each in done),
        first_token_s=median(each.ready.first_token_s for each in done),
        ratio=median(each.ratio for each in done),
        spread=Spread(
            read=_spread([each.read_s for each in done]),
            fill=_spread([each.fill_s for each in done]),
            ready=_spread([each.ready_s for each in done]),
        ),
        resident_bytes=None
        if device.type == "cuda"
        else round(median(each.ready.resident_bytes for each in done)),
        foretold_bytes=found.memory.total_bytes,
        notes=_notes(found.file_bytes, min(from_disk)),
    )


def _notes(file_bytes: int, from_disk: float) -> tuple[str, ...]:
    if from_disk >= FROM_DISK:
        return ()
    return (
        f"only {from_disk:.0%} of {human_bytes(file_bytes)} came from a disk: the file system has "
        "the rest in memory, and a load reads it from there too",
    )


def _read(files: Sequence[Path]) -> tuple[float, float]:
    """Seconds for all files, and the share of them that came from a disk."""
    _drop(files)
    buffer = bytearray(READ_BYTES)
    size, before = 0, _bytes_from_disk()
    began_s = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    taken_s = time.perf_counter() - began_s
    return taken_s, (_bytes_from_disk() - before) / size


def _bytes_from_disk() -> int:
    return int(psutil.Process().io_counters().read_bytes)


def _drop(files: Sequence[Path]) -> None:
    """Makes the system forget what it read of the files."""
    if not hasattr(os, "posix_fadvise"):
        raise CommandError("NOT_MEASURED", "this system cannot drop what it keeps of a file")
    gc.collect()  # what a mapping still shows is not dropped
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _fill(size: int, device: torch.device) -> float:
    """Seconds to write to each byte of new memory once, with torch's threads."""
    began_s = time.perf_counter()
    if device.type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        torch.cuda.synchronize(device)
        taken_s = time.perf_counter() - began_s
        torch.cuda.empty_cache()
        return taken_s
    Arena().empty(size, dtype=torch.uint8).fill_(1)
    return time.perf_counter() - began_s


def _ready_elsewhere(settings: Settings, threads: int | None) -> _Ready:
    # Not forked: a fork would share what this process has already, torch's threads but not alive.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(_ready, settings, threads).result()
        except BrokenProcessPool:
            raise CommandError(
                "NOT_MEASURED", "the process that loaded the model died; the system's log says why"
            ) from None


def _ready(settings: Settings, threads: int | None) -> _Ready:
    began_s = time.perf_counter()
    with Engine.load(
        settings.model,
        settings.device,
        settings.dtype,
        max_sequences=settings.max_sequences,
        max_context=settings.max_context,
        max_step_tokens=settings.max_step_tokens,
        kv_cache_bytes=settings.kv_cache_bytes,
        prefix_caching=settings.prefix_caching,
        num_threads=threads,
        kernels=settings.kernels,
        kv_dtype=settings.kv_dtype,
        cuda_graphs=settings.cuda_graphs,
    ) as engine:
        loaded_s = time.perf_counter()
        request = GenerationRequest(
            prompt_token_ids=[0], max_tokens=1, temperature=0, ignore_eos=True
        )
        engine.submit(request).result()
        ready_s = time.perf_counter()
        stats = engine.stats()
        return _Ready(
            load_s=loaded_s - began_s,
            first_token_s=ready_s - loaded_s,
            held_bytes=sum(stats.bytes.values()),
            resident_bytes=psutil.Process().memory_info().rss,
            device=stats.device,
            dtype=stats.dtype,
        )


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / median(values)
