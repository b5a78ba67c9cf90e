from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.engine import block_plan
from llorch_worker.engine.block_plan import available_bytes, free_bytes, plan_blocks


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


def test_a_containers_limit_counts_as_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert block_plan._cgroup_free_bytes(tmp_path) == 3_000
    # Cached files, the model's own among them, make room for whoever asks.
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 900\nactive_file 100\n")
    assert block_plan._cgroup_free_bytes(tmp_path) == 4_000
    (tmp_path / "memory.max").write_text("max\n")
    assert block_plan._cgroup_free_bytes(tmp_path) is None
    assert block_plan._cgroup_free_bytes(tmp_path / "none") is None
    monkeypatch.setattr(block_plan, "_cgroup_free_bytes", lambda: 3_000)
    assert available_bytes(torch.device("cpu")) == int(3_000 * block_plan.CPU_SHARE)


def test_what_torch_keeps_of_a_load_is_given_back_before_free_memory_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [600]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1_000 - sum(kept), 1_000))
    assert free_bytes(torch.device("cuda")) == 1_000
