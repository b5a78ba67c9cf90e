from __future__ import annotations

import pytest

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.engine.memory.block_plan import plan_blocks


def required_bytes(blocks: int) -> dict[str, int]:
    return {"kv": 1_000 * blocks, "rope": 300, "masks": 700}


def plan(available: int, kv_cache_bytes: int | None = None, max_context: int = 100) -> int:
    return plan_blocks(
        required_bytes,
        block_size=16,
        max_context=max_context,
        max_sequences=4,
        available_bytes=available,
        kv_cache_bytes=kv_cache_bytes,
    )


def test_by_default_every_sequence_may_fill_its_context() -> None:
    assert plan(10**9) == 4 * 7


def test_memory_caps_the_plan_after_tables_and_masks() -> None:
    assert plan(11_000) == 10


def test_a_wish_decides_where_there_is_one() -> None:
    assert plan(10**9, kv_cache_bytes=9_999) == 9
    assert plan(10**9, kv_cache_bytes=99_000) == 99


def test_a_wish_that_does_not_fit_is_refused_with_needed_and_available() -> None:
    with pytest.raises(ModelLoadFailed, match=r"kv_cache_bytes asks for .*, and there is .*lower"):
        plan(11_000, kv_cache_bytes=99_000)


def test_less_than_one_context_is_refused_with_needed_and_available() -> None:
    assert plan(8_000) == 7
    with pytest.raises(ModelLoadFailed) as caught:
        plan(7_999)
    assert "one context of 100 tokens needs" in caught.value.message
    for part in ("kv", "rope", "masks", "there is", "lower max_context"):
        assert part in caught.value.message
    with pytest.raises(ModelLoadFailed, match="kv_cache_bytes allows"):
        plan(10**9, kv_cache_bytes=6_999)
