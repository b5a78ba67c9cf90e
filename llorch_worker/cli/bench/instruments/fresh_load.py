"""``python -m llorch_worker.cli.bench.instruments.fresh_load``: a load in a process of its own."""

from __future__ import annotations

import sys
import time

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from llorch_worker.cli.bench.instruments.disk import bytes_from_disk
from llorch_worker.cli.children import Child, Program, python
from llorch_worker.cli.errors import CommandError
from llorch_worker.cli.model_report import report
from llorch_worker.cli.options import environment_of
from llorch_worker.contract import GenerationRequest, LlorchError
from llorch_worker.settings import Settings


class FreshLoad(BaseModel):
    """What a process tells that loaded the model and generated a token."""

    model_config = ConfigDict(frozen=True)

    device: str
    dtype: str
    load_s: float
    first_token_s: float
    held_bytes: int
    """By weights, KV cache and tables."""
    foretold_bytes: int
    """By the same process, before the load."""
    resident_bytes: int
    """Of the process, when the token was there."""
    from_disk_bytes: int | None
    """Read during the load; None where the system does not tell."""


def load_afresh(settings: Settings, threads: int | None) -> FreshLoad:
    """Waits for the load to end; killed with this process, and by an exception that comes here.

    Raises CommandError with what the process said, where it failed.
    """
    lines: list[str] = []
    program = Program(
        "the load", python("-m", __name__, str(threads or 0)), environment_of(settings)
    )
    child = Child(program, lambda _, line: lines.append(line), lambda _: None)
    try:
        child.wait(None)
    finally:
        child.kill()
    try:
        return FreshLoad.model_validate_json(lines[-1] if lines else "")
    except ValidationError:
        raise CommandError("NOT_MEASURED", f"the load failed: {child.last_words()}") from None


def _load(settings: Settings, threads: int | None) -> FreshLoad:
    from llorch_worker.engine import Engine

    foretold_bytes = report(settings).memory.total_bytes
    request = GenerationRequest(prompt_token_ids=[0], max_tokens=1, temperature=0, ignore_eos=True)
    read_before = bytes_from_disk()
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
        engine.submit(request).result()
        ready_s = time.perf_counter()
        read_after = bytes_from_disk()
        stats = engine.stats()
        return FreshLoad(
            device=stats.device,
            dtype=stats.dtype,
            load_s=loaded_s - began_s,
            first_token_s=ready_s - loaded_s,
            held_bytes=sum(stats.bytes.values()),
            foretold_bytes=foretold_bytes,
            resident_bytes=psutil.Process().memory_info().rss,
            from_disk_bytes=None
            if read_before is None or read_after is None
            else read_after - read_before,
        )


if __name__ == "__main__":
    try:
        print(_load(Settings(), int(sys.argv[1]) or None).model_dump_json())
    except LlorchError as error:
        sys.exit(f"error: {error.message}")
