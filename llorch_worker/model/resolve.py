"""Resolves a checkpoint's metadata into a ModelConfig: reads loosely, then checks strictly."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from llorch_worker.cache import RopeScaling
from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model.config import ModelConfig
from llorch_worker.model.weight_table import EMBEDDING, OUTPUT, check_tensors
from llorch_worker.weights import Checkpoint

logger = logging.getLogger(__name__)

_ROPE_FACTORS = "rope_freqs.weight"
_DEFAULT_ROPE_THETA = 10000.0
_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
}
"""What transformers takes for keys that config.json of a model_type lacks."""


def resolve_config(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a model file.

    Raises ModelLoadFailed, with the reason, for any model that is not a plain Llama.
    """
    gguf = checkpoint.layout == "gguf"
    config = _from_gguf(checkpoint) if gguf else _from_hugging_face(checkpoint)
    _check(config, checkpoint)
    return config


class _Reader:
    """Reads metadata with type checks; ``prefix`` is put before each key."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self._metadata = metadata
        self._prefix = prefix

    def value(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # GGUF may repeat it for each layer
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._unusable(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self._unusable(key, value, "a positive number")
        return float(value)

    def refuse_unless(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse a setting that would change the results; a missing one is allowed."""
        value = self.value(key)
        if value is not None and value not in allowed:
            raise self.refused(f"{self._prefix}{key} is {value!r}", why)

    def refused(self, what: str, why: str) -> ModelLoadFailed:
        return ModelLoadFailed(
            f"{self.path}: {what}, but {why}; serve a plain Llama-family model instead."
        )

    def contradiction(self, what: str) -> ModelLoadFailed:
        return ModelLoadFailed(f"{self.path}: {what}; leave only what is meant in config.json.")

    def _unusable(self, key: str, value: object, wanted: str) -> ModelLoadFailed:
        got = "missing" if value is None else f"{str(value)[:50]!r}"
        return ModelLoadFailed(
            f"{self.path}: {self._prefix}{key} is {got} but the model needs {wanted}; "
            "convert the model again."
        )


def _from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    path, metadata = checkpoint.path, checkpoint.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelLoadFailed(
            f"{path} is not a Llama: its architecture is {architecture!r}; "
            "serve a model of the Llama family."
        )
    read = _Reader(path, metadata, "llama.")
    read.refuse_unless("expert_count", (0,), "mixtures of experts are not supported")
    read.refuse_unless("attention.causal", (True,), "only causal models can generate")
    for key in ("logit_scale", "residual_scale", "embedding_scale", "attention.scale"):
        read.refuse_unless(key, (0.0, 1.0), "this scaling is not supported")
    if EMBEDDING not in checkpoint.tensors:
        raise ModelLoadFailed(
            f"{path} holds no weights (a vocabulary only?); give the file of a whole model."
        )
    heads = read.integer("attention.head_count")
    hidden = read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", max(1, hidden // heads))
    read.refuse_unless("attention.value_length", (head_dim,), "keys and values must have one size")
    read.refuse_unless("rope.dimension_count", (head_dim,), "RoPE must cover whole heads")
    return ModelConfig(
        # From the embedding: some files give a vocabulary size without its padding.
        vocab_size=checkpoint.tensors[EMBEDDING].shape[0],
        hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=read.integer("block_count"),
        num_heads=heads,
        num_kv_heads=read.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        rope_theta=read.number("rope.freq_base", _DEFAULT_ROPE_THETA),
        rope_scaling=_gguf_rope_scaling(checkpoint, read),
        max_context=_within_window(read, "context_length", "attention.sliding_window"),
        tie_word_embeddings=OUTPUT not in checkpoint.tensors,
    )


def _gguf_rope_scaling(checkpoint: Checkpoint, read: _Reader) -> RopeScaling | None:
    kind = read.value("rope.scaling.type")
    read.refuse_unless(
        "rope.scaling.type", ("none", "linear"), "only linear scaling is supported in GGUF files"
    )
    factor = 1.0
    if kind != "none":
        factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0))
    if _ROPE_FACTORS in checkpoint.tensors:
        # Llama 3.1 and later: converters write the scaling as one divisor for each pair.
        factors = checkpoint.load(_ROPE_FACTORS, torch.float32).view(-1).tolist()
        return RopeScaling("factors", factor=factor, factors=tuple(factors))
    return RopeScaling("linear", factor=factor) if factor != 1.0 else None


def _from_hugging_face(checkpoint: Checkpoint) -> ModelConfig:
    path, metadata = checkpoint.path, checkpoint.metadata
    model_type = metadata.get("model_type")
    if not isinstance(model_type, str) or model_type not in _HF_DEFAULTS:
        raise ModelLoadFailed(
            f"{path} is not a Llama: its model_type is {model_type!r}; "
            "serve a model of the Llama family."
        )
    read = _Reader(path, _HF_DEFAULTS[model_type] | dict(metadata))
    named = metadata.get("architectures") or []
    for architecture in named if isinstance(named, list) else [named]:
        if not str(architecture).endswith("ForCausalLM"):
            raise read.refused(
                f"its architecture is {architecture}",
                "a model with no language model head cannot generate",
            )
    read.refuse_unless("hidden_act", ("silu", "swish"), "only SiLU is supported")
    for key in ("attention_bias", "mlp_bias"):
        read.refuse_unless(key, (False,), "biases are not supported")
    if read.value("quantization_config") is not None:
        raise read.refused("its weights are quantised", "only GGUF files may be quantised")
    read.refuse_unless("tie_word_embeddings", (True, False), "it must be true or false")
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    theta, scaling = _hugging_face_rope(read)
    return ModelConfig(
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=read.integer("head_dim", max(1, hidden // heads)),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_context=_within_window(read, "max_position_embeddings", "sliding_window"),
        tie_word_embeddings=bool(read.value("tie_word_embeddings")),
    )


def _hugging_face_rope(read: _Reader) -> tuple[float, RopeScaling | None]:
    """Theta and scaling; new files keep both in rope_parameters, old ones have two keys.

    Raises ModelLoadFailed if a file has both and they differ.
    """
    groups = [read]
    for key in ("rope_parameters", "rope_scaling"):
        if settings := read.value(key):
            if not isinstance(settings, dict):
                raise read.refused(f"its {key} is not an object", "it must be one")
            groups.append(_Reader(read.path, settings))
    for group in groups:
        group.refuse_unless("partial_rotary_factor", (1, 1.0), "RoPE must cover whole heads")
    given = [group for group in groups if group.value("rope_theta") is not None]
    thetas = {group.number("rope_theta") for group in given} or {_DEFAULT_ROPE_THETA}
    if len(thetas) > 1:
        raise read.contradiction(f"it has two values of rope_theta, {sorted(thetas)}")
    scalings = {_hugging_face_scaling(read, group) for group in groups[1:]} or {None}
    if len(scalings) > 1:
        raise read.contradiction("its rope_parameters and rope_scaling contradict each other")
    return thetas.pop(), scalings.pop()


def _hugging_face_scaling(read: _Reader, rope: _Reader) -> RopeScaling | None:
    kind = rope.value("rope_type") or rope.value("type") or "default"
    if kind in ("default", "dynamic"):
        # `dynamic` has no effect within max_position_embeddings, which no sequence may exceed.
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=rope.number("factor"))
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_context=rope.integer("original_max_position_embeddings"),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise read.refused(
                "its RoPE low_freq_factor is not below high_freq_factor", "it must be"
            )
        return scaling
    if kind == "yarn":
        return _yarn(read, rope)
    raise read.refused(
        f"its RoPE scaling is {kind!r}", "only linear, llama3 and yarn are supported"
    )


def _yarn(read: _Reader, rope: _Reader) -> RopeScaling:
    trained = rope.integer(
        "original_max_position_embeddings", read.integer("max_position_embeddings")
    )
    factor = rope.number("factor", read.integer("max_position_embeddings") / trained)

    def strength(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention_factor = strength(1.0)
    if rope.value("mscale") and rope.value("mscale_all_dim"):
        attention_factor = strength(rope.number("mscale")) / strength(rope.number("mscale_all_dim"))
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_context=trained,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", attention_factor),
        truncate=rope.value("truncate") is not False,
    )


def _within_window(read: _Reader, context_key: str, window_key: str) -> int:
    """The model's context, or its sliding window if that is smaller.

    Sliding and full attention are equal within one window only.
    """
    context = read.integer(context_key)
    if not read.value(window_key):
        return context
    window = read.integer(window_key)
    if window < context:
        logger.warning(
            "%s has a sliding window of %d tokens: its context is limited to that instead of %d",
            read.path,
            window,
            context,
        )
    return min(context, window)


def _check(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ModelLoadFailed unless the numbers agree with each other and with the tensors."""
    problem = None
    scaling = config.rope_scaling
    if config.num_heads % config.num_kv_heads:
        problem = f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads"
    elif config.head_dim % 2:
        problem = f"heads of {config.head_dim} have no pairs to rotate"
    elif config.num_layers > len(checkpoint.tensors):
        problem = f"{config.num_layers} layers cannot be in {len(checkpoint.tensors)} tensors"
    elif scaling and scaling.kind == "factors" and len(scaling.factors) != config.head_dim // 2:
        problem = f"{len(scaling.factors)} RoPE factors do not fit heads of {config.head_dim}"
    elif scaling and min(scaling.factors, default=1.0) <= 0:
        problem = f"a RoPE factor is {min(scaling.factors)}, but must be positive"
    if problem:
        raise ModelLoadFailed(f"{checkpoint.path}: {problem}; convert the model again.")
    check_tensors(checkpoint, config)
