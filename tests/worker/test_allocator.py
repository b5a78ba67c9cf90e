"""Memory that one thread of a worker frees serves the others."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

COUNT_ARENAS = """
import ctypes, sys, threading
from llorch_worker.worker.allocator import use_one_arena

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_the_threads_of_a_worker_share_one_arena() -> None:
    assert arenas("any") > 1
    assert arenas("one") == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_the_environment_may_ask_for_more_arenas() -> None:
    assert arenas("one", MALLOC_ARENA_MAX="2") == 2
