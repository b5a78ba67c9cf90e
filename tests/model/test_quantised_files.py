"""Quantised files against the same weights, dequantised by gguf and run by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def dequantised_reference(path: Path) -> LlamaForCausalLM:
    """transformers' float32 model with the file's weights, read without our code."""
    reader = gguf.GGUFReader(path)

    def field(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads = {"attn_q": field("attention.head_count"), "attn_k": field("attention.head_count_kv")}
    state = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *block, part, _ = tensor.name.split(".")
        if part in heads:
            values = (
                values.reshape(heads[part], -1, 2, values.shape[-1])
                .swapaxes(1, 2)
                .reshape(values.shape)
            )
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{NAMES[part]}.weight"] = torch.from_numpy(values.copy())
    tied = "lm_head.weight" not in state
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theta = reader.fields.get("llama.rope.freq_base")
    model = LlamaForCausalLM(
        ReferenceConfig(
            vocab_size=state["lm_head.weight"].shape[0],
            hidden_size=field("embedding_length"),
            intermediate_size=field("feed_forward_length"),
            num_hidden_layers=field("block_count"),
            num_attention_heads=heads["attn_q"],
            num_key_value_heads=heads["attn_k"],
            max_position_embeddings=field("context_length"),
            rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4 if theta is None else theta.contents(),
            },
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    )
    model.load_state_dict(state)
    return model.eval()


def assert_same_logits(open_driver: Callable[..., Any], path: Path) -> None:
    model = dequantised_reference(path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (100,), generator=generator)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    torch.testing.assert_close(open_driver(path).logits(ids.tolist()), expected, atol=1e-3, rtol=0)


FILES = (
    *("f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k_m"),
    *("q4_k_m", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs"),
)


@pytest.mark.parametrize("file", FILES)
def test_random_weights_in_every_block_type_give_the_reference_logits(
    open_driver: Callable[..., Any], random256: Path, file: str
) -> None:
    assert_same_logits(open_driver, random256 / f"{file}.gguf")


def test_every_file_of_the_collection_is_tested(random256: Path) -> None:
    assert {path.stem for path in random256.glob("*.gguf")} == set(FILES)


def test_the_demo_model_gives_the_reference_logits(
    open_driver: Callable[..., Any], demo_model: Path
) -> None:
    assert_same_logits(open_driver, demo_model)
