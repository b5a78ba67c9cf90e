"""A load of a model from disk, in a process of its own."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from llorch_worker.bench.instruments.provenance import Frozen
from llorch_worker.bench.plan import thread_environment
from llorch_worker.contract import GenerationRequest, LlorchError
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.settings import Settings
from llorch_worker.stack.children import Child, Program, python

READ_BYTES = 4 * 2**20


class FreshLoad(Frozen):
    """The report of a process that loaded the model and generated a token."""

    device: str
    dtype: str
    load_s: float
    first_token_s: float
    held_bytes: int
    """Held by weights and tables. The KV blocks of a CPU take memory as they are used."""
    planned_bytes: int
    """Predicted by the same process, before the load, without the KV blocks of a CPU."""
    resident_bytes: int
    """Resident memory of the process after the token."""
    from_disk_bytes: int
    """Read from disks during the load."""

    @property
    def ready_s(self) -> float:
        return self.load_s + self.first_token_s


def load_afresh(settings: Settings, threads: int | None) -> FreshLoad:
    """Load the model of ``settings`` in a new process, which never outlives this call.

    Raises:
        CommandError: the load failed; the message has the process's own error.
    """
    lines: list[str] = []
    environment = {**settings.environment, **thread_environment(threads)}
    program = Program("the load", python("-m", __name__), environment)
    child = Child(program, lambda _, line: lines.append(line), lambda _: None)
    try:
        child.wait(None)
    finally:
        child.kill()
    if child.exit_code != 0 or not lines:
        raise CommandError("NOT_MEASURED", f"{program.name} failed: {child.last_words()}")
    return FreshLoad.model_validate_json(lines[-1])


def drop_cached(files: Sequence[Path]) -> None:
    """Drop the files from the page cache, except for mapped pages.

    Raises CommandError on a system without such a call.
    """
    if not hasattr(os, "posix_fadvise"):
        raise CommandError("NOT_MEASURED", "this system cannot drop a file from its page cache")
    gc.collect()  # unused mappings
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())  # only pages already written to disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_s(files: Sequence[Path]) -> float:
    """Seconds that one thread takes to read all files, one after another."""
    buffer = bytearray(READ_BYTES)
    began_s = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began_s


def bytes_from_disk() -> int:
    """Bytes that this process has read from disks."""
    return int(psutil.Process().io_counters().read_bytes)


def _load(settings: Settings) -> FreshLoad:
    plan = plan_load(settings.model, settings.engine_options)
    kv_bytes = plan.kv_bytes(plan.num_blocks) if plan.device.type == "cpu" else 0
    request = GenerationRequest(prompt_token_ids=[0], max_tokens=1, temperature=0, ignore_eos=True)
    read_before = bytes_from_disk()
    began_s = time.perf_counter()
    with Engine.load(settings.model, settings.engine_options) as engine:
        loaded_s = time.perf_counter()
        engine.submit(request).result()
        ready_s = time.perf_counter()
        stats = engine.stats()
        return FreshLoad(
            device=stats.device,
            dtype=stats.dtype,
            load_s=loaded_s - began_s,
            first_token_s=ready_s - loaded_s,
            held_bytes=sum(stats.bytes.values()) - kv_bytes,
            planned_bytes=plan.total_bytes - kv_bytes,
            resident_bytes=psutil.Process().memory_info().rss,
            from_disk_bytes=bytes_from_disk() - read_before,
        )


if __name__ == "__main__":
    try:
        print(_load(Settings()).model_dump_json())
    except LlorchError as error:
        sys.exit(f"error: {error.message}")
