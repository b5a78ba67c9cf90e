"""The plan of a load: how many KV blocks there are, and why a model is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.errors import InvalidLoadOption
from llorch_worker.engine import Engine, loading
from llorch_worker.engine.memory import load_plan
from llorch_worker.engine.memory.load_plan import LoadPlan, plan_load
from llorch_worker.engine_options import EngineOptions
from llorch_worker.kernels.select import native_absence
from llorch_worker.text import Tokenizer, load_tokenizer
from llorch_worker.weights import Checkpoint
from tests.engine.conftest import LoadedModel
from tests.model.test_families import make_reference

CONTEXT, SEQUENCES = 100, 4
OPTIONS = EngineOptions(device="cpu", dtype="float32", max_sequences=SEQUENCES, max_context=CONTEXT)
CONTEXT_BLOCKS = 7
"""Blocks of 16 tokens for one context."""


@pytest.fixture
def plan(loaded: LoadedModel) -> LoadPlan:
    return planned(loaded)


def planned(loaded: LoadedModel, **options: Any) -> LoadPlan:
    # Operations with a mask, which the exact ones of float32 do without.
    chosen = {"kernels": "torch", "batch_invariant": False, **options}
    return plan_load(loaded.path, replace(OPTIONS, **chosen))


def left_for(plan: LoadPlan, blocks: int) -> int:
    """What weights and vocabulary must leave free for ``blocks`` KV blocks: a CPU's cache may take
    60% of it."""
    config = plan.config
    block = 2 * config.num_layers * 16 * config.num_kv_heads * config.head_dim * 4
    rope = CONTEXT * config.head_dim * 4
    masks = CONTEXT * CONTEXT
    return -(-10 * (blocks * block + rope + masks + plan.workspace_bytes) // 6)


def test_by_default_every_sequence_may_fill_its_context(plan: LoadPlan) -> None:
    assert plan.num_blocks == SEQUENCES * CONTEXT_BLOCKS
    assert plan.full_contexts == SEQUENCES
    assert plan.misfit is None


def test_memory_limits_the_blocks_after_tables_masks_and_workspace(plan: LoadPlan) -> None:
    for blocks in (CONTEXT_BLOCKS, 10, 27):
        assert plan.fitted_to(left_for(plan, blocks)).num_blocks == blocks
        assert plan.fitted_to(left_for(plan, blocks) - 2).num_blocks < blocks or blocks == 7
    assert plan.fitted_to(10**12).num_blocks == SEQUENCES * CONTEXT_BLOCKS


def test_the_vocabulary_takes_memory_from_the_blocks(
    loaded: LoadedModel, plan: LoadPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = plan.weights_bytes + plan.vocabulary_bytes + left_for(plan, 10)
    monkeypatch.setattr(load_plan, "free_bytes", lambda *_: free)
    assert plan.vocabulary_bytes > 0
    assert planned(loaded).num_blocks == 10


def test_only_operations_that_read_a_mask_are_given_one(demo_model: Path) -> None:
    choices = ("torch", "bfloat16"), ("torch", "float32"), ("auto", "bfloat16")
    plans = [
        plan_load(demo_model, EngineOptions(device="cpu", dtype=dtype, kernels=kernels))
        for kernels, dtype in choices
    ]
    for plan in plans:
        assert (plan.cache_bytes["masks"] > 0) == plan.kernels.ops.reads_mask
    assert [plan.cache_bytes["masks"] for plan in plans[:2]] == [512 * 512, 0]


def test_kv_cache_bytes_decide_if_they_are_given(loaded: LoadedModel, plan: LoadPlan) -> None:
    for blocks in (9, 99):
        asked = planned(loaded, kv_cache_bytes=plan.kv_bytes(blocks + 1) - 1)
        assert asked.num_blocks == blocks


def test_kv_cache_bytes_that_do_not_fit_are_refused_and_shown(
    loaded: LoadedModel, plan: LoadPlan
) -> None:
    asked = planned(loaded, kv_cache_bytes=plan.kv_bytes(99))
    refused = asked.fitted_to(left_for(plan, 98))
    assert refused.num_blocks == 99
    with pytest.raises(ModelLoadFailed, match=r"kv_cache_bytes asks for .*, but only .*; lower"):
        refused.require_fit()


def test_less_than_one_context_is_refused_with_what_is_needed_and_free(
    loaded: LoadedModel, plan: LoadPlan
) -> None:
    refused = plan.fitted_to(left_for(plan, CONTEXT_BLOCKS) - 2)
    assert refused.num_blocks == CONTEXT_BLOCKS
    with pytest.raises(ModelLoadFailed) as caught:
        refused.require_fit()
    assert "one context of 100 tokens needs" in caught.value.message
    for part in ("kv", "rope", "masks", "workspace", "is free", "lower max_context"):
        assert part in caught.value.message
    small = planned(loaded, kv_cache_bytes=plan.kv_bytes(CONTEXT_BLOCKS) - 1)
    assert small.misfit is not None
    assert "kv_cache_bytes allows" in small.misfit


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_layers_with_a_window_are_planned_with_the_blocks_of_their_windows(
    family: str, tmp_path: Path
) -> None:
    """Six of seven layers, and all."""
    make_reference(family, max_position_embeddings=4096).save_pretrained(tmp_path)
    options = EngineOptions(device="cpu", dtype="float32", max_sequences=2, max_step_tokens=64)
    plan = plan_load(tmp_path, options)
    blocks, of_window = 2 * 256, 2 * (2 * 4 + 4)
    assert plan.num_blocks == blocks
    assert plan.shape.block_counts(blocks) == (blocks, of_window)
    windowed = sum(window is not None for window in plan.config.graph.windows)
    layer = 2 * 16 * plan.config.num_kv_heads * plan.config.head_dim * 4
    full = (plan.config.num_layers - windowed) * layer
    assert plan.cache_bytes["kv"] == blocks * full + of_window * windowed * layer
    for asked in (300, 900) if full else ():
        kv_bytes = plan.kv_bytes(asked + 1)
        assert plan.with_kv_cache(kv_bytes - 1).num_blocks == asked
        assert plan.with_kv_cache(kv_bytes).num_blocks == asked + 1
    if not full:
        assert plan.with_kv_cache(plan.kv_bytes(1000)).num_blocks == blocks + 2


@pytest.mark.parametrize(
    ("scaling", "default", "longest"),
    [
        ({"rope_type": "yarn", "original_max_position_embeddings": 256}, 1024, 1024),
        ({"rope_type": "linear"}, 256, 1024),
        ({"rope_type": "dynamic"}, 256, 256),
    ],
)
def test_a_context_may_be_as_long_as_the_scaling_of_rope_reaches(
    tmp_path: Path, scaling: dict[str, Any], default: int, longest: int
) -> None:
    rope = {"factor": 4.0, "rope_theta": 1e4, **scaling}
    make_reference(
        "qwen2", max_position_embeddings=256, rope_parameters=rope, use_sliding_window=False
    ).save_pretrained(tmp_path)
    options = EngineOptions(device="cpu", dtype="float32", max_sequences=1)
    for asked, planned in ((None, default), (longest, longest)):
        assert plan_load(tmp_path, replace(options, max_context=asked)).shape.max_context == planned
    with pytest.raises(InvalidLoadOption, match=f"max_context must be at most {longest}"):
        plan_load(tmp_path, replace(options, max_context=longest + 1))


@pytest.fixture
def shrinking(plan: LoadPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for all planned blocks before the load, and for 10 once the weights are loaded."""
    beside = plan.weights_bytes + plan.vocabulary_bytes
    enough = beside + left_for(plan, SEQUENCES * CONTEXT_BLOCKS)
    monkeypatch.setattr(load_plan, "free_bytes", lambda *_: enough)
    monkeypatch.setattr(loading, "free_bytes", lambda *_: left_for(plan, 10))


@pytest.mark.usefixtures("shrinking")
def test_a_load_takes_fewer_blocks_than_planned_if_less_is_free_by_then(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"kernels": "torch", "drafter": "off"}
    with (
        caplog.at_level(logging.INFO, "llorch_worker.engine.loading"),
        Engine.load(loaded.path, OPTIONS, **options) as engine,
    ):
        assert engine.stats().kv_blocks_total == 10
    assert "10 of 28 planned KV blocks fit" in caplog.text
    assert "kernels: torch for torch.float32 on cpu: requested" in caplog.text


def test_drafts_come_by_default_where_they_change_no_bit(
    trained_model: Path, demo_model: Path
) -> None:
    def chosen(path: Path, **options: Any) -> str:
        return plan_load(path, EngineOptions(device="cpu", **options)).options.drafter

    floats = trained_model / "f32.gguf"
    assert chosen(floats, dtype="float32") == "suffix"
    assert chosen(floats, dtype="float32", batch_invariant=False, kernels="torch") == "off"
    assert chosen(floats, dtype="bfloat16", kernels="torch") == "off"
    assert chosen(floats, dtype="bfloat16", kernels="torch", batch_invariant=True) == "suffix"
    assert chosen(floats, dtype="float32", drafter="lookup") == "lookup"
    if native_absence() is None:
        assert chosen(demo_model, dtype="bfloat16") == "suffix"


def test_a_load_reads_the_tokenizer_once(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained_model / "q8_0.gguf"
    read: list[Path] = []

    def noted(checkpoint: Checkpoint) -> Tokenizer:
        read.append(checkpoint.path)
        return load_tokenizer(checkpoint)

    monkeypatch.setattr(load_plan, "load_tokenizer", noted)
    with Engine.load(model, OPTIONS):
        assert read == [model]


def on_a_card(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, free_bytes: int, **options: Any
) -> LoadPlan:
    """The plan for a card with so much free memory, and torch's kernels."""
    monkeypatch.setattr(load_plan, "resolve_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(load_plan, "free_bytes", lambda *_: free_bytes)
    return plan_load(loaded.path, EngineOptions(dtype="bfloat16", kernels="torch", **options))


def test_a_card_takes_many_sequences_by_default_or_as_many_as_it_has_memory_for(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = on_a_card(loaded, monkeypatch, 10**12)
    assert (largest.options.sequences, largest.options.step_tokens) == (256, 8192)
    seen = set()
    for sixteenths in range(1, 33):
        plan = on_a_card(loaded, monkeypatch, largest.total_bytes * sixteenths // 16)
        sequences = plan.options.sequences
        assert plan.options.step_tokens == 32 * sequences
        if sequences > 16:
            assert plan.misfit is None
            assert plan.num_blocks * 16 >= sequences * min(512, plan.shape.max_context)
        seen.add(sequences)
    assert seen == {16, 32, 64, 128, 256}


def test_numbers_that_are_given_stay_on_a_card(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = on_a_card(loaded, monkeypatch, 10**12, max_sequences=300)
    assert (full.options.sequences, full.options.step_tokens) == (300, 8192)
    short = on_a_card(loaded, monkeypatch, full.total_bytes // 20, max_sequences=300)
    assert (short.options.sequences, short.options.step_tokens) == (300, 512)
    both = on_a_card(loaded, monkeypatch, 10**6, max_sequences=7, max_step_tokens=9999)
    assert (both.options.sequences, both.options.step_tokens) == (7, 9999)
    assert both.misfit is not None


def test_a_cpu_keeps_its_defaults(loaded: LoadedModel) -> None:
    plan = plan_load(loaded.path, EngineOptions(device="cpu"))
    assert (plan.options.sequences, plan.options.step_tokens) == (16, 512)


def test_what_recorded_steps_took_is_no_room_for_kv_blocks(plan: LoadPlan) -> None:
    left = left_for(plan, 10)
    assert plan.fitted_to(left).num_blocks == 10
    block = plan.kv_bytes(1)
    assert plan.with_recorded(3 * block).fitted_to(left).num_blocks == 7
    assert plan.with_recorded(9 * block).with_recorded(block).fitted_to(left).num_blocks == 9
