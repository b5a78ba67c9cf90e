"""Engines whose KV cache is in fp8 or int8: smaller by what was foretold, and nearly as exact."""

from __future__ import annotations

from typing import Any

import pytest

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine
from llorch_worker.engine_options import KvDtype
from tests.engine.conftest import LoadedModel

PROMPT = "Once upon a time, there was a little girl named Lily."


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


def greedy(engine: Engine, count: int = 1) -> list[list[int]]:
    request = GenerationRequest(prompt=PROMPT, max_tokens=16, temperature=0)
    generations = [engine.submit(request) for _ in range(count)]
    return [generation.result(60).choices[0].token_ids for generation in generations]


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_a_quantised_cache_writes_a_sensible_story(loaded: LoadedModel, kv_dtype: KvDtype) -> None:
    with load(loaded, "auto") as exact, load(loaded, kv_dtype) as engine:
        expected = greedy(exact)[0]
        got = greedy(engine, count=3)
        assert got[0] == got[1] == got[2]
        # The first token sees a prompt that was attended to before it was quantised.
        assert got[0][0] == expected[0]
        same = sum(a == b for a, b in zip(got[0], expected, strict=False))
        assert same >= 4


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
