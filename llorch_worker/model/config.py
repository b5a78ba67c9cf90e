"""The strict description of a model, resolved from a file's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llorch_worker.cache import Rope


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What a family's graph has beyond Llama's; the defaults are Llama's.

    Blocks ask these; no block knows a family.
    """

    qkv_bias: bool = False
    qk_norm: Literal["none", "head", "whole"] = "none"
    """RMS norms of Q and of K before RoPE: over each head, or over all heads together."""
    norms: Literal["before", "after", "around"] = "before"
    """Where the RMS norms of attention and MLP are: on the input of a branch, on its output before
    the addition, or on both."""
    fused: bool = False
    """The file keeps Q, K and V in one tensor, and gate and up in another."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies the output of each branch before the addition."""
    attention_scale: float | None = None
    """Multiplies Q K^T; None for head_dim ** -0.5."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap) before the mask."""
    windows: tuple[int | None, ...] = ()
    """For each layer how many tokens a query sees, itself included; empty: all for all."""
    logit_divisor: float = 1.0
    logit_softcap: float | None = None
    query_growth: tuple[float, int] | None = None
    """(beta, context): Q is multiplied by 1 + beta * ln(1 + floor(position / context))."""
    other_ropes: tuple[Rope, ...] = ()
    """Kinds of rotation besides the one that every file describes."""
    layer_ropes: tuple[int, ...] = ()
    """For each layer the index of its rotation in ``ModelConfig.ropes``; empty: the first."""


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape and graph, checked, in the same terms for every file format."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    ropes: tuple[Rope, ...]
    """The kinds of rotation; most models have one."""
    max_context: int
    """Tokens that the model was trained for, or that YaRN extends it to."""
    longest_context: int
    """Tokens that it may be asked to hold: more than ``max_context`` where the file does not say
    whether that includes its RoPE scaling."""
    tie_word_embeddings: bool
    interleaved: bool = False
    """The file stores RoPE's pairs as neighbours."""
    norm_offset: float = 0.0
    """What is added to the stored weights of norms."""
    family: str = "Llama"
    graph: Graph = Graph()

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head rotate, in layers that rotate any."""
        dim = self.ropes[0].dim
        return self.head_dim if dim is None else dim

    def window(self, layer: int) -> int | None:
        """How many tokens a query of this layer sees, itself included; None for all."""
        return self.graph.windows[layer] if self.graph.windows else None

    def rope_index(self, layer: int) -> int:
        """The index of a layer's rotation in ``ropes``."""
        return self.graph.layer_ropes[layer] if self.graph.layer_ropes else 0
