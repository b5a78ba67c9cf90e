"""Memory for weights."""

from __future__ import annotations

import gc
import itertools

import psutil
import torch

from llorch_worker.kernels.native.arena import ALIGNMENT_BYTES, Arena

MIB = 1024 * 1024


def test_tensors_lie_side_by_side_each_from_a_cache_line_on() -> None:
    arena = Arena()
    first = arena.empty(3, 5, dtype=torch.bfloat16)
    second = arena.empty(7, dtype=torch.uint8)
    assert first.shape == (3, 5)
    assert first.data_ptr() % ALIGNMENT_BYTES == 0
    assert second.data_ptr() == first.data_ptr() + ALIGNMENT_BYTES


def test_tensors_share_no_memory_across_chunks() -> None:
    arena = Arena()
    tensors = [arena.empty(100 * MIB, dtype=torch.uint8) for _ in range(5)]
    tensors.append(arena.empty(300 * MIB, dtype=torch.uint8))  # more than a chunk
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_memory_is_taken_as_it_is_written_and_goes_with_the_tensors() -> None:
    process = psutil.Process()
    arena = Arena()
    before = process.memory_info().rss
    tensor = arena.empty(128 * MIB, dtype=torch.uint8)
    assert process.memory_info().rss - before < 16 * MIB
    tensor.fill_(1)
    assert process.memory_info().rss - before > 120 * MIB
    del tensor, arena
    gc.collect()
    assert process.memory_info().rss - before < 16 * MIB
