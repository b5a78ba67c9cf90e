from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from llorch_worker.cache import CacheShape, Rope, UnifiedCache
from llorch_worker.engine.loading import resident_tensors
from llorch_worker.engine_options import KvDtype

SHAPE = CacheShape(
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    ropes=(Rope(1e4),),
    max_context=40,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
    vocab_size=11,
)
PARTS = {"kv", "rope", "masks"}


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("max_context", [40, 3000])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 32, "max_query_tokens": 5},
        {"block_size": 4, "windows": (8, None, 20), "max_sequences": 1, "max_step_tokens": 4},
        {"block_size": 4, "windows": (8, 8, 8)},
    ],
)
@pytest.mark.parametrize("decode_rows", [0, 3])
def test_the_bytes_foretold_are_the_bytes_taken(
    kv_dtype: KvDtype, max_context: int, options: dict[str, Any], decode_rows: int
) -> None:
    shape = replace(
        SHAPE, max_context=max_context, kv_dtype=kv_dtype, decode_rows=decode_rows, **options
    )
    foretold = UnifiedCache.required_bytes(shape, 7)
    scales = {"kv_scales"} if kv_dtype == "int8" else set()
    assert foretold.keys() == PARTS | scales | ({"decode"} if decode_rows else set())
    cache = UnifiedCache.allocate(shape, 7)
    if scales:
        pairs = ((group.key_scales, group.value_scales) for group in cache.kv.groups)
        assert foretold["kv_scales"] == sum(each.nbytes for pair in pairs for each in pair)
    foretold["kv"] += foretold.pop("kv_scales", 0)
    parts = cache.parts().items()
    assert {name: taken_bytes(part) for name, part in parts if part is not None} == foretold


def taken_bytes(part: object) -> int:
    storages = (tensor.untyped_storage() for _, tensor in resident_tensors(part))
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_the_tables_are_float32_and_the_blocks_of_the_compute_dtype() -> None:
    cache = UnifiedCache.allocate(SHAPE, 7)
    assert cache.kv.groups[0].keys.dtype == cache.kv.groups[0].values.dtype == torch.bfloat16
    assert cache.kv.groups[0].keys.shape == (3, 7, 16, 2, 8)
    assert cache.rope.cos.shape == (1, 40, 4)
    assert cache.rope.cos.dtype == torch.float32
    assert cache.blocks.total == cache.blocks.free_count == 7


def test_recorded_decode_steps_get_a_block_that_no_sequence_gets() -> None:
    cache = UnifiedCache.allocate(replace(SHAPE, decode_rows=3), 7)
    assert cache.blocks.total == 7
    assert cache.kv.groups[0].keys.shape[1] == 8


def test_the_layers_of_each_window_have_blocks_for_the_windows_of_all_sequences() -> None:
    shape = replace(SHAPE, max_context=3000, windows=(1000, None, 30))
    assert [group.layers for group in shape.groups] == [(1,), (2,), (0,)]
    assert shape.block_counts(500) == (500, 500, 500)
    shape = replace(shape, max_sequences=3, max_step_tokens=48)
    assert shape.block_counts(500) == (500, 2 * (3 * 4 + 3), 2 * (3 * 65 + 3))
    assert shape.block_counts(20) == (20, 20, 20)
    assert [group.layers for group in replace(shape, max_context=1000).groups] == [(0, 1), (2,)]


def test_foretelling_a_huge_cache_allocates_nothing() -> None:
    shape = replace(SHAPE, max_context=131072)
    assert UnifiedCache.required_bytes(shape, 10**9)["masks"] == 1024 * 131072
