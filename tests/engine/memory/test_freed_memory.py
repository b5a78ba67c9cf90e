"""Memory that was freed goes back to the system when the engine has nothing to do."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import psutil
import pytest

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine import thread as engine_thread
from llorch_worker.engine.memory.freed_memory import return_freed_memory
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")

MIB = 2**20
CHUNK_BYTES, CHUNKS = 100 * 1024, 640


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def freed_below_what_is_used() -> int:
    """Memory between others in the heap, as that of a step's tensors; returns the bytes freed."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    chunks = [libc.malloc(CHUNK_BYTES) for _ in range(CHUNKS)]
    for chunk in chunks:
        ctypes.memset(chunk, 1, CHUNK_BYTES)
    for chunk in chunks[:-1]:
        libc.free(chunk)
    return (CHUNKS - 1) * CHUNK_BYTES


def test_freed_memory_is_returned() -> None:
    return_freed_memory()
    before = resident_bytes()
    freed = freed_below_what_is_used()
    assert resident_bytes() - before > freed // 2, "glibc kept none, so this shows nothing"
    return_freed_memory()
    assert resident_bytes() - before < freed // 10


def test_an_idle_engine_returns_what_its_steps_have_freed(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "TIDY_AFTER_S", 0.01)
    with Engine.load(demo_model, max_sequences=1) as engine:
        freed = freed_below_what_is_used()
        kept = resident_bytes()
        request = GenerationRequest(prompt="Once", max_tokens=4, temperature=0)
        engine.submit(request).result(timeout=60)
        wait_until(lambda: kept - resident_bytes() > freed // 2)
