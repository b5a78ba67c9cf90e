"""Engines whose KV cache is in fp8 or int8: smaller by what was foretold, and nearly as exact."""

from __future__ import annotations

from typing import Any

from llorch_worker.engine import Engine
from llorch_worker.engine_options import KvDtype
from tests.engine.conftest import LoadedModel


def load(loaded: LoadedModel, kv_dtype: KvDtype, **options: Any) -> Engine:
    return Engine.load(
        loaded.path,
        device="cpu",
        dtype="float32",
        max_sequences=3,
        max_context=96,
        kernels="torch",
        kv_dtype=kv_dtype,
        **options,
    )


def test_the_bytes_of_each_form_are_reported(loaded: LoadedModel) -> None:
    parts = {}
    for kv_dtype in ("auto", "fp8", "int8"):
        with load(loaded, kv_dtype) as engine:
            stats = engine.stats()
            assert stats.dtype == "float32"
            assert {part: stats.planned_bytes[part] for part in stats.bytes} == stats.bytes
            parts[kv_dtype] = stats.bytes
    assert parts["fp8"]["kv"] == parts["int8"]["kv"] == parts["auto"]["kv"] // 4
    head_dim = loaded.config.head_dim
    assert parts["int8"]["kv_scales"] == parts["auto"]["kv"] // head_dim


def test_a_budget_in_bytes_holds_more_blocks_where_blocks_are_smaller(loaded: LoadedModel) -> None:
    config = loaded.config
    block_bytes = 16 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    blocks = {}
    for kv_dtype in ("auto", "fp8"):
        with load(loaded, kv_dtype, kv_cache_bytes=40 * block_bytes) as engine:
            blocks[kv_dtype] = engine.stats().kv_blocks_total
    assert blocks == {"auto": 40, "fp8": 160}
