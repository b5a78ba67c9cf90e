"""The model's weights: the checkpoint's tensors that form each one, and their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod

import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model.config import ModelConfig
from llorch_worker.model.ropes import ROPE_FACTORS
from llorch_worker.weights import (
    Checkpoint,
    FusedWeight,
    Linears,
    Part,
    RopeOrder,
    embedding_bytes,
)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_IGNORED_NAMES = frozenset(ROPE_FACTORS)
"""Derived values, or read by the configuration; not weights of the graph."""


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one block. What its graph lacks is None."""

    before_attention: FusedWeight | None
    qkv: FusedWeight
    qkv_bias: FusedWeight | None
    q_norm: FusedWeight | None
    k_norm: FusedWeight | None
    output: FusedWeight
    after_attention: FusedWeight | None
    before_mlp: FusedWeight | None
    gate_up: FusedWeight
    down: FusedWeight
    after_mlp: FusedWeight | None

    @property
    def vectors(self) -> tuple[FusedWeight, ...]:
        """Norms and biases."""
        vectors = (
            *(self.before_attention, self.qkv_bias, self.q_norm, self.k_norm),
            *(self.after_attention, self.before_mlp, self.after_mlp),
        )
        return tuple(vector for vector in vectors if vector is not None)

    @property
    def matrices(self) -> tuple[FusedWeight, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)


_NORM_NAMES = {
    "before": ("input", None, "post_attention", None),
    "after": (None, "post_attention", None, "post_feedforward"),
    "around": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
}
"""The norms before and after attention, then those of the MLP, as transformers names them."""


def layer_weights(config: ModelConfig, layer: int) -> LayerWeights:
    """The weights of block ``layer``."""
    graph, hidden = config.graph, config.hidden_size
    q_rows = config.num_heads * config.head_dim
    at = f"model.layers.{layer}."
    before_attention, after_attention, before_mlp, after_mlp = (
        None if name is None else _one(f"{at}{name}_layernorm.weight", hidden)
        for name in _NORM_NAMES[graph.norms]
    )
    return LayerWeights(
        before_attention=before_attention,
        qkv=_qkv(config, at, "weight", hidden),
        qkv_bias=_qkv(config, at, "bias") if graph.qkv_bias else None,
        q_norm=_qk_norm(config, at + "self_attn.q_norm.weight", config.num_heads),
        k_norm=_qk_norm(config, at + "self_attn.k_norm.weight", config.num_kv_heads),
        output=_one(at + "self_attn.o_proj.weight", hidden, q_rows),
        after_attention=after_attention,
        before_mlp=before_mlp,
        gate_up=_gate_up(config, at),
        down=_one(at + "mlp.down_proj.weight", hidden, config.intermediate_size),
        after_mlp=after_mlp,
    )


def _one(name: str, *shape: int) -> FusedWeight:
    return FusedWeight((Part(name, shape),))


def _qkv(config: ModelConfig, at: str, kind: str, *columns: int) -> FusedWeight:
    """The rows of Q's heads, then K's, then V's."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    at += "self_attn."
    if config.graph.fused:
        rows = (heads + 2 * kv_heads) * head_dim
        return FusedWeight(
            (Part(f"{at}qkv_proj.{kind}", (rows, *columns), _order(config, heads + kv_heads)),)
        )
    return FusedWeight(
        (
            Part(f"{at}q_proj.{kind}", (heads * head_dim, *columns), _order(config, heads)),
            Part(f"{at}k_proj.{kind}", (kv_heads * head_dim, *columns), _order(config, kv_heads)),
            Part(f"{at}v_proj.{kind}", (kv_heads * head_dim, *columns)),
        )
    )


def _qk_norm(config: ModelConfig, name: str, heads: int) -> FusedWeight | None:
    if config.graph.qk_norm == "none":
        return None
    heads = heads if config.graph.qk_norm == "whole" else 1
    return FusedWeight((Part(name, (heads * config.head_dim,), _order(config, heads)),))


def _gate_up(config: ModelConfig, at: str) -> FusedWeight:
    """The gate's rows, then up's."""
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.graph.fused:
        return _one(at + "mlp.gate_up_proj.weight", 2 * inner, hidden)
    return FusedWeight(
        (
            Part(at + "mlp.gate_proj.weight", (inner, hidden)),
            Part(at + "mlp.up_proj.weight", (inner, hidden)),
        )
    )


def _order(config: ModelConfig, heads: int) -> RopeOrder | None:
    """How the file orders the rows of ``heads`` heads, unless it is the model's order."""
    if not config.interleaved and config.rotary_dim == config.head_dim:
        return None
    return RopeOrder(heads, config.head_dim, config.rotary_dim, config.interleaved)


def global_weights(config: ModelConfig) -> tuple[FusedWeight, ...]:
    """Embedding, final norm and, unless tied to the embedding, the output matrix."""
    matrix = (config.vocab_size, config.hidden_size)
    parts = [Part(EMBEDDING, matrix), Part(FINAL_NORM, (config.hidden_size,))]
    if not config.tie_word_embeddings:
        parts.append(Part(OUTPUT, matrix))
    return tuple(FusedWeight((part,)) for part in parts)


def all_weights(config: ModelConfig) -> Iterator[FusedWeight]:
    yield from global_weights(config)
    for layer in range(config.num_layers):
        table = layer_weights(config, layer)
        yield from (*table.vectors, *table.matrices)


def parameter_count(config: ModelConfig) -> int:
    """The number of parameters."""
    return sum(weight.elements for weight in all_weights(config))


def shares_embedding(config: ModelConfig, linears: Linears) -> bool:
    """Whether the output matrix is the embedding's own tensor and takes no memory."""
    return config.tie_word_embeddings and linears.shared is not None


def model_bytes(
    config: ModelConfig, checkpoint: Checkpoint, linears: Linears, dtype: torch.dtype
) -> int:
    """The exact bytes of all weights as they will be kept; reads no weights.

    Norms and biases are kept in ``dtype``, matrices and the embedding as ``linears`` does.
    """
    embedding, *vectors = global_weights(config)[:2]
    for layer in range(config.num_layers):
        vectors += layer_weights(config, layer).vectors
    kept = sum(weight.elements for weight in vectors) * dtype.itemsize
    kept += embedding_bytes(checkpoint, embedding, dtype, as_stored=linears.embedding_as_stored)
    matrices = _matrices(config, linears)
    return kept + sum(linears.weight_bytes(checkpoint, weight) for weight in matrices)


def quantised_types(
    config: ModelConfig, checkpoint: Checkpoint, linears: Linears
) -> tuple[str, ...]:
    """Block types that stay quantised, the one with most parameters first."""
    numbers = Counter[str]()
    for weight in _matrices(config, linears) if linears.keeps_quantised else ():
        for part in weight.quantised_parts(checkpoint):
            numbers[checkpoint.tensors[part.name].dtype_name] += prod(part.shape)
    return tuple(name for name, _ in numbers.most_common())


def _matrices(config: ModelConfig, linears: Linears) -> Iterator[FusedWeight]:
    """The weights that ``linears`` keeps."""
    embedding, _, *output = global_weights(config)
    if output:
        yield from output
    elif not shares_embedding(config, linears):
        yield embedding
    for layer in range(config.num_layers):
        yield from layer_weights(config, layer).matrices


def check_tie(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise ModelLoadFailed if an output matrix beside tied embeddings is not a copy of them."""
    if not config.tie_word_embeddings or OUTPUT not in checkpoint.tensors:
        return
    if not checkpoint.repeats(EMBEDDING, OUTPUT):
        raise ModelLoadFailed(
            f"{checkpoint.path}: tensor {OUTPUT} differs from {EMBEDDING}, but config.json "
            "ties them (tie_word_embeddings); set that to false, or leave the tensor out."
        )


def check_tensors(
    checkpoint: Checkpoint, config: ModelConfig, beside: Collection[str] = ()
) -> None:
    """Raise ModelLoadFailed unless the checkpoint holds the model's tensors and no others but those
    ``beside`` them.

    Ignoring a tensor that the graph does not use (a bias, an expert) would change the results.
    """
    known: set[str] = {*beside}
    for weight in all_weights(config):
        for part in weight.parts:
            known.add(part.name)
            checkpoint.require(part.name, part.shape)
    if config.tie_word_embeddings:
        known.add(OUTPUT)  # some files repeat the embedding under this name
    for name in checkpoint.tensors:
        if name in known or name in _IGNORED_NAMES or name.endswith(_IGNORED_SUFFIXES):
            continue
        if checkpoint.adds_nothing(name):
            continue
        raise ModelLoadFailed(
            f"{checkpoint.path} has a tensor {checkpoint.stored_name(name)} that {config.family}'s "
            "graph does not use; models with experts, adapters or other additions cannot be served."
        )
