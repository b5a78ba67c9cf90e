"""Reads how a model rotates its queries and keys, in the terms of both file formats."""

from __future__ import annotations

import math

import torch

from llorch_worker.cache import Rope, RopeScaling
from llorch_worker.model.reader import Reader
from llorch_worker.model_files.bounds import CONTEXT, ROPE_VALUES, require
from llorch_worker.weights import Checkpoint

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of GGUF files that are no weights of the graph."""
_DEFAULT_THETA = 10000.0


def gguf_rope(checkpoint: Checkpoint, read: Reader, head_dim: int) -> Rope:
    """The rotation of a GGUF file, as llama.cpp computes it."""
    dim = read.integer("rope.dimension_count", head_dim)
    scaling = _gguf_scaling(checkpoint, read)
    return Rope(read.number("rope.freq_base", _DEFAULT_THETA), scaling, dim)


def _gguf_scaling(checkpoint: Checkpoint, read: Reader) -> RopeScaling | None:
    freqs, long, short = ROPE_FACTORS
    kind = read.value("rope.scaling.type")
    read.refuse_unless(
        "rope.scaling.type",
        ("none", "linear", "yarn", "longrope"),
        "only linear, yarn and longrope are supported in GGUF files",
    )
    factor = 1.0
    if kind != "none":
        factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0))
    if kind == "yarn":
        return _gguf_yarn(read, factor)
    if long in checkpoint.tensors or short in checkpoint.tensors:
        return RopeScaling(
            "longrope",
            original_max_context=read.integer(
                "rope.scaling.original_context_length", read.integer("context_length")
            ),
            attention_factor=read.number("rope.scaling.attn_factor", 1.0),
            factors=_values(checkpoint, short),
            long_factors=_values(checkpoint, long),
        )
    if freqs in checkpoint.tensors:
        # Llama 3.1 and later: converters write the scaling as one divisor for each pair.
        return RopeScaling("factors", factor=factor, factors=_values(checkpoint, freqs))
    return RopeScaling("linear", factor=factor) if factor != 1.0 else None


def _gguf_yarn(read: Reader, factor: float) -> RopeScaling:
    read.refuse_unless("rope.scaling.yarn_ext_factor", (1.0,), "another blend is not supported")
    attention_factor = _strength(factor)
    if read.value("rope.scaling.yarn_log_multiplier"):
        attention_factor /= _strength(factor, read.number("rope.scaling.yarn_log_multiplier"))
    key = "rope.scaling.original_context_length"
    original = read.integer(key, read.integer("context_length"))
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_context=original,
        extended_context=0 if read.value(key) is None else int(factor * original),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor * read.number("rope.scaling.attn_factor", 1.0),
    )


def _values(checkpoint: Checkpoint, name: str) -> tuple[float, ...]:
    count = math.prod(checkpoint.require(name).shape)
    require(checkpoint.path, f"the number of values in {name}", count, ROPE_VALUES)
    return tuple(checkpoint.load(name, torch.float32).view(-1).tolist())


def hugging_face_rope(read: Reader, head_dim: int, default_theta: float) -> Rope:
    """The rotation in a config.json: new files keep it in rope_parameters, old ones in several
    keys."""
    groups = [read]
    for key in ("rope_parameters", "rope_scaling"):
        if settings := read.value(key):
            if isinstance(settings, dict):  # models with windows keep one for each kind of layer
                settings = settings.get("full_attention", settings)
            if not isinstance(settings, dict):
                raise read.refused(f"its {key} is not an object", "it must be one")
            groups.append(Reader(read.path, settings))
    theta = _one_value(read, groups, "rope_theta", default_theta)
    share = _one_value(read, groups, "partial_rotary_factor", 1.0)
    dim = int(head_dim * share)
    scalings = {_hugging_face_scaling(read, group, dim) for group in groups[1:]} or {None}
    if len(scalings) > 1:
        raise read.contradiction("its rope_parameters and rope_scaling contradict each other")
    return Rope(theta, scalings.pop(), dim)


def _one_value(read: Reader, groups: list[Reader], key: str, default: float) -> float:
    values = {group.number(key) for group in groups if group.value(key) is not None} or {default}
    if len(values) > 1:
        raise read.contradiction(f"it has two values of {key}, {sorted(values)}")
    return values.pop()


def _hugging_face_scaling(read: Reader, rope: Reader, dim: int) -> RopeScaling | None:
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
            original_max_context=_original_context(read, rope)
            or rope.integer("original_max_position_embeddings"),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise read.refused(
                "its RoPE low_freq_factor is not below high_freq_factor", "it must be"
            )
        return scaling
    if kind == "yarn":
        return _yarn(read, rope)
    if kind in ("longrope", "su"):
        return _longrope(read, rope, dim)
    raise read.refused(
        f"its RoPE scaling is {str(kind)[:50]!r}",
        "only linear, llama3, yarn and longrope are supported",
    )


def _original_context(read: Reader, rope: Reader) -> int | None:
    """What the model was trained for before it was extended, beside the scaling or in it."""
    key = "original_max_position_embeddings"
    values = [each.integer(key) for each in (rope, read) if each.value(key) is not None]
    if len({*values}) > 1:
        raise read.contradiction(f"it has two values of {key}, {sorted(values)}")
    return values[0] if values else None


def contexts(read: Reader, key: str, scaling: RopeScaling | None) -> tuple[int, int]:
    """How many tokens a model takes: by default, and where more are asked for.

    ``key``: of what the file gives as its context. YaRN's original context times its factor counts
    by default, because cards of models tell their users to add the scaling and leave the rest.
    Files of other scalings differ in whether the stated context includes the factor.
    """
    stated = read.integer(key, bound=CONTEXT)
    if scaling is None or scaling.kind not in ("linear", "yarn"):
        return stated, stated
    default = max(stated, scaling.extended_context)
    longest = max(default, 0 if scaling.extended_context else int(scaling.factor * stated))
    require(read.path, "the context times the factor of its RoPE scaling", longest, CONTEXT)
    return default, longest


def _yarn(read: Reader, rope: Reader) -> RopeScaling:
    context = read.integer("max_position_embeddings")
    named = _original_context(read, rope)
    original = context if named is None else named
    factor = rope.number("factor", context / original)
    attention_factor = _strength(factor)
    if rope.value("mscale") and rope.value("mscale_all_dim"):
        attention_factor = _strength(factor, rope.number("mscale"))
        attention_factor /= _strength(factor, rope.number("mscale_all_dim"))
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_context=original,
        extended_context=0 if named is None else int(factor * named),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", attention_factor),
        truncate=rope.value("truncate") is not False,
    )


def _strength(factor: float, scale: float = 1.0) -> float:
    """How much YaRN sharpens attention: the multiplier of cosines and sines."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(read: Reader, rope: Reader, dim: int) -> RopeScaling:
    context = read.integer("max_position_embeddings")
    original = _original_context(read, rope) or context
    if original == 1:
        raise read.refused("its original context is a single token", "longrope needs more")
    factor = rope.number("factor", context / original)
    strength = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        "longrope",
        original_max_context=original,
        attention_factor=rope.number("attention_factor", strength),
        factors=rope.numbers("short_factor", dim // 2),
        long_factors=rope.numbers("long_factor", dim // 2),
    )
