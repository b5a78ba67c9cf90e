"""A load of a model, or a write to new memory, each in its own process."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import psutil
import torch

from llorch_worker.bench.instruments.disk import bytes_from_disk
from llorch_worker.bench.instruments.provenance import Frozen
from llorch_worker.contract import GenerationRequest, LlorchError
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.kernels.arena import Arena
from llorch_worker.settings import Settings
from llorch_worker.stack.children import Child, Program, python


class FreshLoad(Frozen):
    """The report of a process that loaded the model and generated a token."""

    device: str
    dtype: str
    load_s: float
    first_token_s: float
    held_bytes: int
    """Held by weights and tables. The KV blocks of a CPU take memory as they are used."""
    foretold_bytes: int
    """Predicted by the same process, before the load, without the KV blocks of a CPU."""
    resident_bytes: int
    """Resident memory of the process after the token."""
    from_disk_bytes: int | None
    """Read during the load; None if the system does not report it."""


def load_afresh(settings: Settings, threads: int | None) -> FreshLoad:
    """Load the model of ``settings`` in a new process.

    Like :func:`write_afresh` it waits for the process, which never outlives this call. Raises
    CommandError with the process's own error if it fails.
    """
    return FreshLoad.model_validate_json(_answer(settings.environment, "load", threads))


def write_afresh(size: int, threads: int | None) -> float:
    """Write once to ``size`` bytes of new memory in a new process; returns seconds.

    The process must be new, like one that loads: memory that was just freed is faster to get,
    much faster in a virtual machine.
    """
    return float(_answer({}, "write", threads, str(size)))


def _answer(environment: Mapping[str, str], what: str, threads: int | None, *arguments: str) -> str:
    lines: list[str] = []
    command = python("-m", __name__, what, str(threads or 0), *arguments)
    program = Program(f"the {what}", command, environment)
    child = Child(program, lambda _, line: lines.append(line), lambda _: None)
    try:
        child.wait(None)
    finally:
        child.kill()
    if child.exit_code != 0 or not lines:
        raise CommandError("NOT_MEASURED", f"{program.name} failed: {child.last_words()}")
    return lines[-1]


def _write_s(size: int) -> float:
    began_s = time.perf_counter()
    held = Arena().zeros(size, dtype=torch.uint8)
    held.fill_(1)
    # Read before the memory is freed.
    return time.perf_counter() - began_s


def _load(settings: Settings) -> FreshLoad:
    plan = plan_load(settings.model, **settings.engine_options)
    kv_bytes = plan.num_blocks * plan.block_bytes if plan.device.type == "cpu" else 0
    request = GenerationRequest(prompt_token_ids=[0], max_tokens=1, temperature=0, ignore_eos=True)
    read_before = bytes_from_disk()
    began_s = time.perf_counter()
    with Engine.load(settings.model, **settings.engine_options) as engine:
        loaded_s = time.perf_counter()
        engine.submit(request).result()
        ready_s = time.perf_counter()
        read_after = bytes_from_disk()
        known = read_before is not None and read_after is not None
        stats = engine.stats()
        return FreshLoad(
            device=stats.device,
            dtype=stats.dtype,
            load_s=loaded_s - began_s,
            first_token_s=ready_s - loaded_s,
            held_bytes=sum(stats.bytes.values()) - kv_bytes,
            foretold_bytes=plan.total_bytes - kv_bytes,
            resident_bytes=psutil.Process().memory_info().rss,
            from_disk_bytes=(read_after or 0) - (read_before or 0) if known else None,
        )


if __name__ == "__main__":
    what, threads, *rest = sys.argv[1:]
    if int(threads):
        torch.set_num_threads(int(threads))
    try:
        print(_write_s(int(rest[0])) if what == "write" else _load(Settings()).model_dump_json())
    except LlorchError as error:
        sys.exit(f"error: {error.message}")
