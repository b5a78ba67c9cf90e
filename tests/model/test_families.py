"""Every family against transformers in float32, from a folder and from a GGUF file alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.model.gguf_of import write_gguf_of

Open = Callable[..., Any]

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    # Larger than the usual 0.02, so that attention is far from uniform.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
    },
    "tie_word_embeddings": True,
}
"""Of heads of 16, of which 12 numbers rotate."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "phi3": ("Phi3", {}),
    "phi3-mini": ("Phi3", LONG),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "ministral": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "olmo2": ("Olmo2", {}),
}


@pytest.fixture(scope="session", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' model with random weights; ``folder``: where it is saved."""
    name, options = FAMILIES[request.param]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**SHAPE | options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif key.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    folder = tmp_path_factory.mktemp("family")
    model.save_pretrained(folder)
    model.folder = folder
    return model


@pytest.fixture(scope="session", params=["folder", "gguf"])
def path(request: pytest.FixtureRequest, reference: Any) -> Path:
    if request.param == "folder":
        return Path(reference.folder)
    return write_gguf_of(reference, reference.folder / "model.gguf")


def random_ids(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(96, (count,), generator=generator).tolist()


@torch.inference_mode()
def test_logits_agree_with_transformers(open_driver: Open, reference: Any, path: Path) -> None:
    ids = random_ids(200)
    expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(open_driver(path).logits(ids), expected, atol=1e-3, rtol=0)


@torch.inference_mode()
def test_a_prompt_in_chunks_and_token_by_token_equals_the_prompt_at_once(
    open_driver: Open, path: Path
) -> None:
    driver, ids = open_driver(path), random_ids(150)
    expected = driver.logits(ids)
    ends = [0, 40, 41, 97, *range(98, 151)]
    rows = [
        driver.step({"a": ids[first:last]}, all_logits=True)
        for first, last in itertools.pairwise(ends)
    ]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_200_greedy_tokens_are_those_of_transformers(
    open_driver: Open, reference: Any, path: Path
) -> None:
    driver, ids = open_driver(path), random_ids(40)
    row = driver.step({"a": ids})[-1]
    while len(ids) < 240:
        ids.append(int(row.argmax()))
        row = driver.step({"a": ids[-1:]})[-1]
    # The choice after each token but the last, given the tokens before it.
    chosen = reference(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    assert ids[40:] == chosen[39:-1]
