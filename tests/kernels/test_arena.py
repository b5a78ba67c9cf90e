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


def advice(address: int) -> list[str]:
    """The flags of the mapping that holds an address."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(each, 16) for each in found.groups())
            holds = first <= address < end
        elif holds and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping holds the address")


def test_memory_may_have_huge_pages() -> None:
    """Whether the kernel has some free is another matter."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    tensor = Arena().zeros(64 * MIB, dtype=torch.uint8)
    assert "hg" in advice(tensor.data_ptr())


def test_memory_is_used_when_written_and_freed_with_the_tensors() -> None:
    process = psutil.Process()
    arena = Arena()
    gc.collect()
    before = process.memory_info().rss
    tensor = arena.zeros(128 * MIB, dtype=torch.uint8)
    assert process.memory_info().rss - before < 16 * MIB
    tensor.fill_(1)
    assert process.memory_info().rss - before > 120 * MIB
    del tensor, arena
    gc.collect()
    assert process.memory_info().rss - before < 16 * MIB
