"""Which tensors of a checkpoint make up which weight of the model, and of what shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.model.config import LlamaConfig
from llorch_worker.weights import Checkpoint
from llorch_worker.weights.checkpoint import missing_tensor, require_shape

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_IGNORED_NAMES = frozenset({"rope_freqs.weight"})
"""Derived or read by the configuration: no weights of the graph."""


@dataclass(frozen=True)
class Part:
    """Some rows of a weight: one tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    rope_heads: int | None = None


@dataclass(frozen=True)
class PackedWeight:
    """One weight of the model: its parts, stacked by rows in this order."""

    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> torch.Tensor:
        """Allocate the whole, then fill it part by part: no second copy at any time."""
        out = torch.empty(self.shape, dtype=dtype)
        row = 0
        for part in self.parts:
            rows = out[row : row + part.shape[0]]
            checkpoint.read_into(part.name, rows, part.rope_heads)
            row += part.shape[0]
        return out


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one block."""

    attention_norm: PackedWeight
    qkv: PackedWeight
    output: PackedWeight
    mlp_norm: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight

    def __iter__(self) -> Iterator[PackedWeight]:
        yield from (
            self.attention_norm,
            self.qkv,
            self.output,
            self.mlp_norm,
            self.gate_up,
            self.down,
        )


def layer_weights(config: LlamaConfig, layer: int) -> LayerWeights:
    """The table of block ``layer``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    at = f"model.layers.{layer}."

    def weight(*parts: Part) -> PackedWeight:
        return PackedWeight(parts)

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


def global_weights(config: LlamaConfig) -> tuple[PackedWeight, ...]:
    """Embedding, final norm and, unless it is the embedding again, the output matrix."""
    matrix = (config.vocab_size, config.hidden_size)
    weights = [
        PackedWeight((Part(EMBEDDING, matrix),)),
        PackedWeight((Part(FINAL_NORM, (config.hidden_size,)),)),
    ]
    if not config.tie_word_embeddings:
        weights.append(PackedWeight((Part(OUTPUT, matrix),)))
    return tuple(weights)


def all_weights(config: LlamaConfig) -> Iterator[PackedWeight]:
    yield from global_weights(config)
    for layer in range(config.num_layers):
        yield from layer_weights(config, layer)


def model_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights in ``dtype``, without loading any."""
    return sum(math.prod(weight.shape) for weight in all_weights(config)) * dtype.itemsize


def check_tensors(checkpoint: Checkpoint, config: LlamaConfig) -> None:
    """Raise ModelLoadFailed unless the checkpoint holds the model's tensors and no others.

    A tensor that the graph does not know (a bias, an expert) would change the results unseen.
    """
    known: set[str] = set()
    for weight in all_weights(config):
        for part in weight.parts:
            known.add(part.name)
            info = checkpoint.tensors.get(part.name)
            if info is None:
                raise missing_tensor(checkpoint.path, part.name)
            require_shape(checkpoint.path, info, part.shape)
    if config.tie_word_embeddings:
        known.add(OUTPUT)  # some files repeat the embedding under this name
    for name in checkpoint.tensors:
        if name in known or name in _IGNORED_NAMES or name.endswith(_IGNORED_SUFFIXES):
            continue
        raise ModelLoadFailed(
            f"{checkpoint.path} has a tensor {name} that Llama's graph does not use; "
            "only plain Llama models (no attention bias, experts or adapters) can be served."
        )
