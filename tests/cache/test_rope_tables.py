from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llorch_worker.cache import Rope, RopeScaling, RopeTables
from llorch_worker.cache.rope_tables import inverse_frequencies

CPU = torch.device("cpu")
HEAD_DIM, MAX_CONTEXT = 64, 1024

CASES: list[tuple[RopeScaling | None, dict[str, Any]]] = [
    (None, {"rope_type": "default"}),
    (RopeScaling("linear", factor=2.5), {"rope_type": "linear", "factor": 2.5}),
    (
        RopeScaling("llama3", factor=8.0, original_max_context=128),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    (
        RopeScaling("yarn", factor=8.0, original_max_context=128, attention_factor=1.2),
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "attention_factor": 1.2,
        },
    ),
    (
        RopeScaling(
            "yarn", factor=4.0, original_max_context=256, beta_fast=20, beta_slow=2, truncate=False
        ),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "attention_factor": 1.0,
            "beta_fast": 20,
            "beta_slow": 2,
            "truncate": False,
        },
    ),
]


@pytest.mark.parametrize(("scaling", "parameters"), CASES)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_the_tables_are_those_of_transformers(
    scaling: RopeScaling | None, parameters: dict[str, Any], theta: float
) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_CONTEXT,
        rope_parameters=parameters | {"rope_theta": theta},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(MAX_CONTEXT)[None])
    ropes = (Rope(theta, scaling),)
    tables = RopeTables(ropes, head_dim=HEAD_DIM, max_context=MAX_CONTEXT, device=CPU)
    half = HEAD_DIM // 2
    torch.testing.assert_close(tables.cos[0], cos[0, :, :half], atol=1e-5, rtol=0)
    torch.testing.assert_close(tables.sin[0], sin[0, :, :half], atol=1e-5, rtol=0)


def test_factors_divide_each_frequency() -> None:
    plain = inverse_frequencies(Rope(10000.0), 8, 32)
    scaled = inverse_frequencies(
        Rope(10000.0, RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0))), 8, 32
    )
    torch.testing.assert_close(scaled, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_rows_are_looked_up_by_position() -> None:
    tables = RopeTables((Rope(1e4),), head_dim=8, max_context=32, device=CPU)
    ((cos, sin),) = tables.at(torch.tensor([31, 0, 7]))
    assert cos.shape == sin.shape == (3, 4)
    assert torch.equal(cos, tables.cos[0, [31, 0, 7]])
    assert (cos[1] == 1).all()
    assert (sin[1] == 0).all()
