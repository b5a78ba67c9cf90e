"""The arena's memory."""

from __future__ import annotations

import gc
import itertools
import re
from pathlib import Path

import psutil
import pytest
import torch

from llorch_worker.kernels.arena import ALIGNMENT_BYTES, Arena

MIB = 1024 * 1024


def test_tensors_are_adjacent_and_aligned_to_cache_lines() -> None:
    arena = Arena()
    first = arena.zeros(3, 5, dtype=torch.bfloat16)
    second = arena.zeros(7, dtype=torch.uint8)
    assert first.shape == (3, 5)
    assert first.data_ptr() % ALIGNMENT_BYTES == 0
    assert second.data_ptr() == first.data_ptr() + ALIGNMENT_BYTES
    assert [tensor.untyped_storage().nbytes() for tensor in (first, second)] == [30, 7]


def test_tensors_never_overlap() -> None:
    arena = Arena()
    tensors = [arena.zeros(100 * MIB, dtype=torch.uint8) for _ in range(5)]
    tensors.append(arena.zeros(300 * MIB, dtype=torch.uint8))  # more than a chunk
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def huge_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kib) * 1024 for kib in re.findall(r"^AnonHugePages: +(\d+) kB", rollup, re.M))


def test_memory_uses_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel gives no huge pages")
    before = huge_bytes()
    tensor = Arena().zeros(64 * MIB, dtype=torch.uint8)
    tensor.fill_(1)
    # Not necessarily all of it: a machine's memory may be fragmented.
    assert huge_bytes() - before > 0


def test_memory_is_used_when_written_and_freed_with_the_tensors() -> None:
    process = psutil.Process()
    arena = Arena()
    before = process.memory_info().rss
    tensor = arena.zeros(128 * MIB, dtype=torch.uint8)
    assert process.memory_info().rss - before < 16 * MIB
    tensor.fill_(1)
    assert process.memory_info().rss - before > 120 * MIB
    del tensor, arena
    gc.collect()
    assert process.memory_info().rss - before < 16 * MIB
