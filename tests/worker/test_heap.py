"""Python's memory moves into huge pages where the kernel can, and is not collected again."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from llorch_worker.settings import Settings
from llorch_worker.worker import heap
from llorch_worker.worker.card.claim import Place
from llorch_worker.worker.celery.bootstep import _warm_up as warm_up
from tests.toy_engine import ToyEngine

MEASURE = """
import ctypes, json, mmap
from pathlib import Path
from llorch_worker.worker.heap import MADV_COLLAPSE, collapse_heap

MIB = 2**20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

def sizes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = dict(line.split(":") for line in lines)
    return [int(found[name].split()[0]) // 1024 for name in ("Rss", "AnonHugePages")]

def used(size, every):
    memory = mmap.mmap(-1, size, flags=PRIVATE)
    # Else it is in huge pages already, where the operator says always.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for start in range(0, size, every):
        memory[start] = 1
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory

texts = [b"%d" % number * 50 for number in range(50_000)]
in_use = used(32 * MIB, mmap.PAGESIZE)
hardly_used = used(64 * MIB, MIB)
# Else the kernel may take both for one mapping, mostly not in use.
hardly_used.madvise(mmap.MADV_DONTFORK)
before = sizes()
collapse_heap()
after = sizes()
assert all(text == b"%d" % number * 50 for number, text in enumerate(texts))
assert in_use[:: mmap.PAGESIZE] == b"\\1" * (32 * MIB // mmap.PAGESIZE)

probe = mmap.mmap(-1, 8 * MIB, flags=PRIVATE)
probe.write(b"x" * 8 * MIB)
start = ctypes.addressof(ctypes.c_char.from_buffer(probe))
start += -start % (2 * MIB)
refused = ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(2 * MIB), MADV_COLLAPSE)
switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
can = refused == 0 and switch.exists() and "[never]" not in switch.read_text()
print(json.dumps([can, before, after]))
"""


def test_what_is_in_use_moves_and_nothing_else_becomes_resident() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True
    )
    can, (resident, huge), (resident_after, huge_after) = json.loads(done.stdout)
    if not can:
        pytest.skip("this kernel collapses no pages on request")
    assert huge_after - huge >= 16, "MiB: most of the 32 in use, wherever they begin"
    assert resident_after - resident < 32, "MiB: not what is hardly used"


@pytest.mark.parametrize("error", [FileNotFoundError(), psutil.AccessDenied(), AttributeError()])
def test_mappings_that_cannot_be_read_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    switch = tmp_path / "enabled"
    switch.write_text("always [madvise] never")
    monkeypatch.setattr(heap, "_SWITCH", switch)
    monkeypatch.setattr(psutil.Process, "memory_maps", refuse)
    heap.collapse_heap()


def test_the_operator_s_never_is_obeyed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("looked for memory to move")

    switch = tmp_path / "enabled"
    switch.write_text("always madvise [never]")
    monkeypatch.setattr(heap, "_SWITCH", switch)
    monkeypatch.setattr(psutil.Process, "memory_maps", fail)
    heap.collapse_heap()


def test_what_a_warm_worker_has_is_not_collected_again() -> None:
    kept = [object()]
    try:
        with closing(ToyEngine("toy", max_sequences=1, max_context=64)) as engine:
            warm_up(engine, Settings(), Place("toy"))
        assert not any(each is kept for each in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(each is kept for each in gc.get_objects())
