"""The model's weights: the checkpoint's tensors that form each one, and their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model.config import ModelConfig
from llorch_worker.weights import Checkpoint, FusedWeight, Linears, Part, embedding_bytes

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_IGNORED_NAMES = frozenset({"rope_freqs.weight"})
"""Derived values, or read by the configuration; not weights of the graph."""


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one block."""

    attention_norm: FusedWeight
    qkv: FusedWeight
    output: FusedWeight
    mlp_norm: FusedWeight
    gate_up: FusedWeight
    down: FusedWeight

    @property
    def norms(self) -> tuple[FusedWeight, ...]:
        return (self.attention_norm, self.mlp_norm)

    @property
    def matrices(self) -> tuple[FusedWeight, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)


def layer_weights(config: ModelConfig, layer: int) -> LayerWeights:
    """The weights of block ``layer``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    at = f"model.layers.{layer}."

    def weight(*parts: Part) -> FusedWeight:
        return FusedWeight(parts)

    return LayerWeights(
        attention_norm=weight(Part(at + "input_layernorm.weight", (hidden,))),
        qkv=weight(
            Part(at + "self_attn.q_proj.weight", (q_rows, hidden), config.num_heads),
            Part(at + "self_attn.k_proj.weight", (kv_rows, hidden), config.num_kv_heads),
            Part(at + "self_attn.v_proj.weight", (kv_rows, hidden)),
        ),
        output=weight(Part(at + "self_attn.o_proj.weight", (hidden, q_rows))),
        mlp_norm=weight(Part(at + "post_attention_layernorm.weight", (hidden,))),
        gate_up=weight(
            Part(at + "mlp.gate_proj.weight", (inner, hidden)),
            Part(at + "mlp.up_proj.weight", (inner, hidden)),
        ),
        down=weight(Part(at + "mlp.down_proj.weight", (hidden, inner))),
    )


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
        yield from (*table.norms, *table.matrices)


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

    Norms are kept in ``dtype``, matrices and the embedding as ``linears`` does.
    """
    embedding, *norms = global_weights(config)[:2]
    for layer in range(config.num_layers):
        norms += layer_weights(config, layer).norms
    kept = sum(weight.elements for weight in norms) * dtype.itemsize
    kept += embedding_bytes(checkpoint, embedding, dtype, as_stored=linears.embedding_as_stored)
    matrices = _matrices(config, linears)
    return kept + sum(linears.weight_bytes(checkpoint, weight) for weight in matrices)


def quantised_types(
    config: ModelConfig, checkpoint: Checkpoint, linears: Linears
) -> tuple[str, ...]:
    """Block types that stay quantised, the one with most parameters first."""
    numbers = Counter[str]()
    for weight in _matrices(config, linears):
        for part in linears.quantised_parts(checkpoint, weight):
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


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise ModelLoadFailed unless the checkpoint holds the model's tensors and no others.

    Ignoring a tensor that the graph does not use (a bias, an expert) would change the results.
    """
    known: set[str] = set()
    for weight in all_weights(config):
        for part in weight.parts:
            known.add(part.name)
            checkpoint.require(part.name, part.shape)
    if config.tie_word_embeddings:
        known.add(OUTPUT)  # some files repeat the embedding under this name
    for name in checkpoint.tensors:
        if name in known or name in _IGNORED_NAMES or name.endswith(_IGNORED_SUFFIXES):
            continue
        raise ModelLoadFailed(
            f"{checkpoint.path} has a tensor {name} that Llama's graph does not use; "
            "only plain Llama models (no attention bias, experts or adapters) can be served."
        )
