from __future__ import annotations

from typing import Any

import pytest
import torch

from llorch_worker.cache import UnifiedCache

SHAPE: dict[str, Any] = {
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "num_blocks": 7,
    "device": torch.device("cpu"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_context", [40, 3000])
@pytest.mark.parametrize("options", [{}, {"block_size": 32, "max_query_tokens": 5}])
def test_the_bytes_foretold_are_the_bytes_taken(
    dtype: torch.dtype, max_context: int, options: dict[str, int]
) -> None:
    shape = SHAPE | options | {"dtype": dtype, "max_context": max_context}
    cache = UnifiedCache.allocate(**shape)
    assert cache.bytes_by_part() == UnifiedCache.required_bytes(**shape)
    assert set(cache.bytes_by_part()) == {"kv", "rope", "masks"}
    assert cache.bytes_by_part()["kv"] == cache.kv.keys.nbytes + cache.kv.values.nbytes


def test_the_tables_are_float32_and_the_blocks_of_the_compute_dtype() -> None:
    cache = UnifiedCache.allocate(**SHAPE, dtype=torch.bfloat16, max_context=40)
    assert cache.kv.keys.dtype == cache.kv.values.dtype == torch.bfloat16
    assert cache.kv.keys.shape == (3, 7, 16, 2, 8)
    assert cache.rope.cos.shape == (40, 4)
    assert cache.rope.cos.dtype == torch.float32
    assert cache.blocks.total == cache.blocks.free_count == 7


def test_foretelling_a_huge_cache_allocates_nothing() -> None:
    shape = SHAPE | {"num_blocks": 10**9, "max_context": 131072, "dtype": torch.float32}
    assert UnifiedCache.required_bytes(**shape)["masks"] == 1024 * 131072
