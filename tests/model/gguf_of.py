"""Writes a model of transformers as a GGUF file, in the way of llama.cpp's converters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from random_blocks import BLOCK_TYPES, random_blocks

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
PERMUTED = ("llama", "mistral", "granite", "smollm3", "ministral3")
"""Their converters make neighbours of RoPE's pairs."""


def write_gguf_of(
    model: Any,
    path: Path,
    kinds: Sequence[gguf.GGMLQuantizationType] = (),
    also: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """``model``: of transformers, in float32. ``also`` writes more, such as a vocabulary.

    With ``kinds``, matrices take them in turn, as far as their rows allow; the model's own weights
    become what the file then holds.
    """
    turn = itertools.cycle(kinds)
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_shape(writer, config)
    _add_rope(writer, config)
    if also is not None:
        also(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, values in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        if config.model_type in PERMUTED and key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            values = _neighbours(values, heads)
        else:
            heads = 0
        if kinds and values.ndim == 2:
            kind = next(k for k in turn if not values.shape[1] % gguf.GGML_QUANT_SIZES[k][0])
            stored = _blocks(values, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
            meant = torch.from_numpy(gguf.dequantize(stored, kind)).view(values.shape)
            model.get_parameter(key).data.copy_(_apart(meant, heads) if heads else meant)
            continue
        if config.model_type.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(name, np.ascontiguousarray(values.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _neighbours(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Each head's rows i and i + head_dim / 2 become its rows 2i and 2i + 1."""
    return matrix.view(heads, 2, -1, matrix.shape[-1]).transpose(1, 2).reshape(matrix.shape)


def _apart(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes ``_neighbours``."""
    return matrix.view(heads, -1, 2, matrix.shape[-1]).transpose(1, 2).reshape(matrix.shape)


def _blocks(values: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """``values`` in blocks; where gguf writes none, random ones of the same spread."""
    if kind not in BLOCK_TYPES:
        return gguf.quantize(values.numpy(), kind)
    random = np.random.default_rng(values.numel())
    return random_blocks(kind).rows(random, tuple(values.shape), float(values.std()))


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = _head_dim(config)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.model_type == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _add_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if "full_attention" in rope:
        rope = rope["full_attention"]
        writer.add_sliding_window(config.sliding_window)
    elif getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    dim = int(_head_dim(config) * (rope.get("partial_rotary_factor") or 1.0))
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        growth = np.log(config.max_position_embeddings / original) / np.log(original)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + growth)))
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)
