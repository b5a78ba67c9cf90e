from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hugging_face import NAMES
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from llorch_worker.cache import Rope, RopeScaling
from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model import ModelConfig, resolve_config
from llorch_worker.model.weight_table import EMBEDDING
from llorch_worker.weights import open_checkpoint

WriteGguf = Callable[..., Path]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def resolve(path: Path) -> ModelConfig:
    return resolve_config(open_checkpoint(path))


NULL = object()
"""JSON's null, where None would leave a key out."""


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a Hugging Face folder with keys of config.json changed, or left out with None."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    # The saved folders have the new RoPE keys, which would override the old ones.
    if "rope_scaling" in changes or "rope_theta" in changes:
        config.pop("rope_parameters", None)
    config |= changes
    config = {key: value for key, value in config.items() if value is not None}
    config = {key: None if value is NULL else value for key, value in config.items()}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_both_formats_of_one_model_resolve_to_the_same_config(trained_model: Path) -> None:
    config = resolve(trained_model / "hf")
    assert config == ModelConfig(
        vocab_size=1536,
        hidden_size=128,
        intermediate_size=384,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        ropes=(Rope(10000.0, dim=32),),
        max_context=512,
        longest_context=512,
        tie_word_embeddings=False,
    )
    for file in trained_model.glob("*.gguf"):
        from_gguf = resolve(file)
        assert from_gguf.rms_norm_eps == pytest.approx(1e-5)
        assert from_gguf.interleaved
        changed = {"rms_norm_eps": 1e-5, "interleaved": False}
        assert from_gguf.__dict__ | changed == config.__dict__


def refuse(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadFailed, match=message) as raised:
        resolve(path)
    assert str(path) in raised.value.message
    assert "; " in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "qwen2moe"}, "'qwen2moe', which is none of the supported fam"),
        ({"general.architecture": "bert"}, "an encoder, which generates no text"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.embedding_length": None}, "embedding_length is missing"),
        ({"llama.block_count": 0}, "block_count is '0' but the model needs a positive"),
        ({"llama.block_count": 3}, "has no tensor blk.2.attn_norm.weight"),
        ({"llama.block_count": 2**30}, "layers cannot be in"),
        ({"llama.block_count": 1}, "does not use"),
        ({"llama.attention.head_count": [4, 8]}, "head_count is .* positive integer"),
        ({"llama.attention.head_count_kv": 3}, "cannot share 3 KV heads"),
        ({"llama.attention.head_count_kv": 4}, r"\[32, 64\] but .*calls for \[64, 64\]"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "positive number"),
        ({"llama.attention.key_length": 15}, "no pairs to rotate"),
        ({"llama.attention.value_length": 8}, "must have one size"),
        ({"llama.rope.dimension_count": 18}, "RoPE covers whole heads, not 18"),
        ({"llama.rope.scaling.type": "spiral"}, "only linear, yarn and longrope"),
        ({"llama.context_length": None}, "context_length is missing"),
        ({"llama.feed_forward_length": 95}, r"calls for \[95, 64\]"),
    ],
)
def test_a_gguf_file_that_is_not_a_plain_llama_is_refused(
    tmp_path: Path, write_gguf: WriteGguf, metadata: dict[str, Any], message: str
) -> None:
    refuse(write_gguf(tmp_path / "m.gguf", metadata=metadata), message)


def test_a_bias_or_a_missing_tensor_is_refused(tmp_path: Path, write_gguf: WriteGguf) -> None:
    bias = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    refuse(write_gguf(tmp_path / "a.gguf", tensors=bias), "attn_q.bias that Llama's graph")
    missing = {"blk.1.attn_v.weight": None}
    refuse(write_gguf(tmp_path / "b.gguf", tensors=missing), "no tensor blk.1.attn_v")
    norm = {"output_norm.weight": np.ones(63, np.float32)}
    refuse(write_gguf(tmp_path / "c.gguf", tensors=norm), r"output_norm.weight is \[63\]")


def test_a_vocabulary_without_weights_is_refused(sentencepiece_vocabulary: Path) -> None:
    refuse(sentencepiece_vocabulary / "vocab-only.gguf", "holds no weights")


def test_gguf_metadata_are_read_leniently(tmp_path: Path, write_gguf: WriteGguf) -> None:
    metadata = {
        "llama.attention.head_count": [4, 4],  # once for each layer
        "llama.attention.head_count_kv": [2, 2],
        "llama.rope.freq_base": 5e5,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.vocab_size": 79,  # the embedding has 80 rows
    }
    tensors = {"output.weight": None}
    config = resolve(write_gguf(tmp_path / "m.gguf", metadata=metadata, tensors=tensors))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.ropes == (Rope(5e5, RopeScaling("linear", factor=4.0), 16),)
    assert config.vocab_size == 80
    assert config.tie_word_embeddings


def test_rope_factors_in_a_gguf_file_are_llama3_scaling(
    tmp_path: Path,
    write_gguf: WriteGguf,
    save_llama: Callable[..., Path],
    open_driver: Callable[..., Any],
) -> None:
    """Converters write Llama 3.1's scaling as divisors, which must give the same logits."""
    from llorch_worker.cache.rope_tables import inverse_frequencies

    shape = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 80}
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    folder = save_llama(**shape, intermediate_size=96, num_hidden_layers=2, rope_parameters=llama3)
    checkpoint = open_checkpoint(folder)
    config = resolve_config(checkpoint)
    scaled = inverse_frequencies(config.ropes[0], 16, config.max_context)
    factors = (inverse_frequencies(Rope(1e4), 16, config.max_context) / scaled).numpy()
    names = {hugging_face: gguf for gguf, hugging_face in NAMES.items()}
    tensors = {"rope_freqs.weight": factors}
    for name in checkpoint.tensors:
        values = checkpoint.load(name, torch.float32).numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = values.shape[0] // 16
            values = values.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(values.shape)
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            tensors[f"blk.{layer}.{names[part]}.weight"] = np.ascontiguousarray(values)
        else:
            tensors[f"{names[stem]}.weight"] = values
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors)
    ids = list(range(1, 80))
    torch.testing.assert_close(
        open_driver(path).logits(ids), open_driver(folder).logits(ids), atol=1e-4, rtol=0
    )


def test_rope_factors_of_another_head_size_are_refused(
    tmp_path: Path, write_gguf: WriteGguf
) -> None:
    tensors = {"rope_freqs.weight": np.ones(7, np.float32)}
    refuse(write_gguf(tmp_path / "m.gguf", tensors=tensors), "7 RoPE factors do not fit")


@pytest.mark.parametrize(
    ("factor", "message"), [(0.0, "factor is 0.0"), (np.nan, "tensor rope_freqs.weight has")]
)
def test_rope_factors_that_make_no_frequency_are_refused(
    tmp_path: Path, write_gguf: WriteGguf, factor: float, message: str
) -> None:
    factors = np.ones(8, np.float32)
    factors[3] = factor
    refuse(write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors}), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', which is none of the supported"),
        ({"model_type": None}, "model_type is 'None', which is none of the supported"),
        ({"model_type": "bert"}, "an encoder, which generates no text"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no language model head"),
        ({"architectures": 7}, "no language model head"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but Llama's is silu"),
        ({"attention_bias": True}, "biases are not supported"),
        ({"mlp_bias": True}, "biases are not supported"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method in quantization_config"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size is '48' but the model needs a positive integer"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is '-1'"),
        ({"vocab_size": 97}, "calls for"),
        ({"num_hidden_layers": 4}, "has no tensor model.layers.3"),
        ({"partial_rotary_factor": 0.5}, "RoPE covers whole heads"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "RoPE scaling is 'spiral'"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor is missing but .* 4 positive"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": ["linear"]}}, "RoPE scaling is"),
        ({"rope_scaling": [1]}, "rope_scaling is not an object"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LINEAR},
            "rope_parameters and rope_scaling contradict each other",
        ),
        (
            {"rope_parameters": LINEAR, "rope_scaling": LINEAR | {"factor": 4.0}},
            "rope_parameters and rope_scaling contradict each other",
        ),
        (
            {"rope_parameters": LINEAR | {"rope_theta": 1e4}, "rope_theta": 5e5},
            "two values of rope_theta",
        ),
        ({"rope_theta": 1e-308}, "its RoPE rotates by angles that are no finite numbers"),
        ({"rope_scaling": LINEAR | {"factor": 1e-308}}, "its RoPE rotates by angles"),
        ({"rope_scaling": YARN | {"factor": 1e-308}}, "its RoPE rotates by angles"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "YaRN cannot scale RoPE with a theta of 1"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 1,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                }
            },
            "its original context is a single token",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 128},
            r"two values of original_max_position_embeddings, \[128, 256\]",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "not below high_freq_factor",
        ),
    ],
)
def test_a_folder_that_is_not_a_plain_llama_is_refused(
    tmp_path: Path, random_llama: Path, changes: dict[str, Any], message: str
) -> None:
    refuse(edited(random_llama, tmp_path / "m", **changes), message)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 1e4, RopeScaling("linear", factor=2)),
        # No effect within the model's own context, which no sequence may exceed.
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1e4, None),
    ],
)
def test_the_old_rope_keys_are_read(
    tmp_path: Path,
    random_llama: Path,
    changes: dict[str, Any],
    theta: float,
    scaling: RopeScaling | None,
) -> None:
    config = resolve(edited(random_llama, tmp_path / "m", **changes))
    assert config.ropes == (Rope(theta, scaling, 8),)


def test_old_and_new_rope_keys_may_say_the_same(tmp_path: Path, random_llama: Path) -> None:
    new = {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}
    for number, old in enumerate(({"rope_theta": 5e5}, {"rope_scaling": LINEAR})):
        config = resolve(edited(random_llama, tmp_path / f"m{number}", rope_parameters=new, **old))
        assert config.ropes == (Rope(5e5, RopeScaling("linear", factor=2), 8),)


@pytest.mark.parametrize("window", [None, NULL, 4096, 9000])
def test_a_missing_window_and_context_are_those_of_the_model_type_in_transformers(
    tmp_path: Path, random_llama: Path, window: Any
) -> None:
    path = edited(
        random_llama,
        tmp_path / "m",
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        sliding_window=window,
        max_position_embeddings=None,
    )
    reference = AutoConfig.from_pretrained(path)
    config = resolve(path)
    assert config.max_context == reference.max_position_embeddings
    assert config.window(0) == reference.sliding_window


LINEAR_4 = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "default", "longest"),
    [
        # As Qwen 2.5's card has it, and with the context that Qwen 3's configuration states.
        ({"rope_scaling": YARN}, 1024, 1024),
        ({"rope_scaling": YARN, "max_position_embeddings": 320}, 1024, 1024),
        ({"rope_scaling": YARN, "max_position_embeddings": 1024}, 1024, 1024),
        ({"rope_scaling": YARN, "max_position_embeddings": 5000}, 5000, 5000),
        ({"rope_parameters": YARN}, 1024, 1024),
        (
            {
                "rope_scaling": YARN | {"original_max_position_embeddings": None},
                "original_max_position_embeddings": 128,
            },
            512,
            512,
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 256, 1024),
        # Vicuna states its context before the scaling, DeepSeek Coder after it.
        ({"rope_scaling": LINEAR_4}, 256, 1024),
        ({"rope_scaling": LINEAR_4 | {"rope_type": "dynamic"}}, 256, 256),
        ({}, 256, 256),
    ],
)
def test_yarn_extends_the_context_that_the_file_states(
    tmp_path: Path, random_llama: Path, changes: dict[str, Any], default: int, longest: int
) -> None:
    config = resolve(edited(random_llama, tmp_path / "m", **changes))
    assert (config.max_context, config.longest_context) == (default, longest)


@pytest.mark.parametrize(
    ("kind", "original", "default", "longest"),
    [("yarn", 16, 128, 128), ("yarn", None, 64, 512), ("linear", None, 64, 512)],
)
def test_a_gguf_file_extends_its_context_alike(
    tmp_path: Path,
    write_gguf: WriteGguf,
    kind: str,
    original: int | None,
    default: int,
    longest: int,
) -> None:
    metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 8.0}
    metadata |= {"llama.rope.scaling.original_context_length": original, "llama.context_length": 64}
    config = resolve(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert (config.max_context, config.longest_context) == (default, longest)


def test_a_window_below_the_extended_context_holds(tmp_path: Path, random_llama: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    path = edited(random_llama, tmp_path / "m", rope_scaling=YARN, sliding_window=512, **mistral)
    assert resolve(path).window(0) == 512


def tied(folder: Path, target: Path, output: torch.Tensor) -> Path:
    """A copy of a folder whose embeddings are tied, with an output matrix beside them."""
    edited(folder, target, tie_word_embeddings=True)
    tensors = load_file(target / "model.safetensors")
    tensors |= {"lm_head.weight": output if output.numel() else tensors[EMBEDDING]}
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, target / "model.safetensors"
    )
    return target


def test_an_output_matrix_that_contradicts_tied_embeddings_is_refused(
    tmp_path: Path, random_llama: Path, open_driver: Callable[..., Any]
) -> None:
    """transformers would use it, and other readers the embedding."""
    same = tied(random_llama, tmp_path / "same", torch.empty(0))
    assert len(open_driver(same).logits([1, 2])) == 2
    matrix = load_file(random_llama / "model.safetensors")[EMBEDDING].clone()
    matrix[5, 7] += 1e-3
    for number, other in enumerate((matrix, matrix.bfloat16())):
        path = tied(random_llama, tmp_path / f"m{number}", other)
        with pytest.raises(ModelLoadFailed, match=r"lm_head.weight differs from model.embed_tok"):
            open_driver(path)
