"""The strict description of a model, resolved from a file's metadata."""

from __future__ import annotations

from dataclasses import dataclass

from llorch_worker.cache import RopeScaling


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
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_context: int
    """Tokens that the model was trained for, or its sliding window if that is smaller."""
    tie_word_embeddings: bool
