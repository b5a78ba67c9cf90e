"""Memory that a worker's thread frees serves the others, and goes back if there is no work."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llorch_worker.allocator import return_freed_memory
from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine import thread as engine_thread
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")

CHUNK_BYTES, CHUNKS = 100 * 1024, 640

COUNT_ARENAS = """
import ctypes, sys, threading
from llorch_worker.allocator import use_one_arena

if sys.argv[1] == "one":
    use_one_arena()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
malloc = libc.malloc
malloc.restype = ctypes.c_void_p
both = threading.Barrier(2)

def allocate():
    both.wait()
    assert malloc(10_000)
    both.wait()

threads = [threading.Thread(target=allocate) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


def arenas(how: str, **environment: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    told = subprocess.run(
        [sys.executable, "-c", COUNT_ARENAS, how],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout.count("<heap nr=")


def test_the_threads_of_a_worker_share_one_arena() -> None:
    assert arenas("any") > 1
    assert arenas("one") == 1


def test_the_environment_may_ask_for_more_arenas() -> None:
    assert arenas("one", MALLOC_ARENA_MAX="2") == 2


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
