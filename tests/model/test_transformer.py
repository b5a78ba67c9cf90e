from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from llorch_worker.model import ForwardPass
from llorch_worker.model.weight_table import model_bytes
from llorch_worker.weights import DenseLinears, open_checkpoint

Open = Callable[..., Any]


def reference(path: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def random_ids(count: int, vocab: int = 96, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=generator).tolist()


@torch.inference_mode()
def assert_layers_agree(driver: Any, model: LlamaForCausalLM, ids: Sequence[int]) -> None:
    """Hidden states after each block within 1e-4 of transformers', logits within 1e-3."""
    expected = model(torch.tensor([list(ids)]), output_hidden_states=True)
    batch = driver.batch({"layers": ids}, all_logits=True)
    step = ForwardPass(batch, driver.cache, driver.model.ops)
    for i, block in enumerate(driver.model.blocks):
        # Each block gets transformers' input: the bound is for one layer.
        x, residual = block(expected.hidden_states[i][0], None, step)
        if i + 1 < len(driver.model.blocks):
            torch.testing.assert_close(
                x + residual, expected.hidden_states[i + 1][0], atol=1e-4, rtol=0
            )
    driver.free("layers")
    torch.testing.assert_close(driver.logits(ids), expected.logits[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"head_dim": 16},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["gqa", "mha", "mqa", "wide-heads", "tied", "theta", "linear", "llama3", "yarn"],
)
def test_every_layer_of_a_random_model_agrees_with_transformers(
    open_driver: Open, save_llama: Callable[..., Path], options: dict[str, Any]
) -> None:
    path = save_llama(**options)
    assert_layers_agree(open_driver(path), reference(path), random_ids(150))


def test_sequences_in_a_mixed_step_get_the_same_logits_as_alone(
    open_driver: Open, random_llama: Path
) -> None:
    driver = open_driver(random_llama)
    texts = {name: random_ids(60, seed=i) for i, name in enumerate("abcdef")}
    alone = {name: driver.logits(ids) for name, ids in texts.items()}
    # In one step: decode at three depths, a middle chunk, a whole prompt and a prompt of one.
    starts = {"a": 5, "b": 0, "c": 59, "d": 30, "e": 0, "f": 33}
    ends = {"a": 6, "b": 60, "c": 60, "d": 47, "e": 1, "f": 34}
    for name, start in starts.items():
        if start:
            driver.step({name: texts[name][:start]})
    logits = driver.step({name: ids[starts[name] : ends[name]] for name, ids in texts.items()})
    for row, name in zip(logits, texts, strict=True):
        torch.testing.assert_close(row, alone[name][ends[name] - 1], atol=1e-5, rtol=1e-5)


def test_a_neighbour_full_of_nan_changes_nothing(open_driver: Open, random_llama: Path) -> None:
    driver = open_driver(random_llama)
    ids = random_ids(40)
    expected = driver.logits(ids)
    driver.step({"sick": random_ids(40, seed=1)})
    driver.step({"well": ids[:-1]})
    sick = torch.tensor(driver.tables["sick"])
    driver.cache.kv.groups[0].keys[:, sick] = float("nan")
    driver.cache.kv.groups[0].values[:, sick] = float("nan")
    logits = driver.step({"sick": [1], "well": ids[-1:]})
    assert logits[0].isnan().any()
    torch.testing.assert_close(logits[1], expected[-1], atol=1e-5, rtol=1e-5)


def test_old_contents_of_blocks_change_nothing(open_driver: Open, random_llama: Path) -> None:
    driver = open_driver(random_llama, num_blocks=4)
    ids = random_ids(50)
    first = driver.logits(ids)
    driver.cache.kv.groups[0].keys.fill_(float("nan"))
    driver.cache.kv.groups[0].values.fill_(float("nan"))
    assert torch.equal(driver.logits(ids), first)
    assert driver.cache.blocks.free_count == 4


def test_a_step_without_logits_rows_returns_no_rows(open_driver: Open, random_llama: Path) -> None:
    driver = open_driver(random_llama)
    batch = driver.batch({"a": random_ids(9)})
    object.__setattr__(batch, "logits_rows", torch.tensor([], dtype=torch.int64))
    assert driver.model.forward(batch, driver.cache).shape == (0, 96)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_narrow_dtypes_stay_close_to_float32(
    open_driver: Open, trained_model: Path, dtype: torch.dtype, atol: float
) -> None:
    ids = random_ids(64, vocab=1536)
    exact = open_driver(trained_model / "hf").logits(ids)
    driver = open_driver(trained_model / "hf", dtype=dtype)
    logits = driver.logits(ids)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().mean() < atol


def test_weight_bytes_equal_those_of_the_file(open_driver: Open, trained_model: Path) -> None:
    driver = open_driver(trained_model / "f32.gguf", dtype=torch.bfloat16)
    stored = sum(
        t.stored_bytes for t in open_checkpoint(trained_model / "f32.gguf").tensors.values()
    )
    assert driver.model.weight_bytes == stored // 2
    linears = DenseLinears(torch.device("cpu"), torch.bfloat16)
    checkpoint = open_checkpoint(trained_model / "f32.gguf")
    assert model_bytes(driver.model.config, checkpoint, linears, torch.bfloat16) == stored // 2
