"""The least that a forward pass must read and compute, from the model's shape.

Intermediate results are left out, so that shares of the machine's ceilings are never too high. A
multiplication and an addition count as two operations.
"""

from __future__ import annotations

from llorch_worker.cache import CacheShape, PagedKV
from llorch_worker.engine import Engine
from llorch_worker.model import ModelConfig


def decode_step_bytes(engine: Engine, sequences: int, context_tokens: float) -> float:
    """Bytes that one decode step reads: the weights once, and each sequence's keys and values.

    ``context_tokens``: the mean length of a sequence.
    """
    cached = sequences * context_tokens * kv_token_bytes(engine.cache.shape)
    return engine.matrix_bytes + cached


def kv_token_bytes(shape: CacheShape) -> int:
    """Bytes that the cache keeps for a token, in all layers."""
    return sum(PagedKV.slot_bytes(shape).values())


def decode_flops(config: ModelConfig, sequences: int, context_tokens: int) -> int:
    """Operations of one new token for each of ``sequences``, which hold ``context_tokens``
    together, new ones included."""
    layers, output = _matrix_numbers(config)
    return 2 * sequences * (layers + output) + _attention(config) * context_tokens


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """Operations of a prompt's causal prefill with logits for its last token."""
    layers, output = _matrix_numbers(config)
    return 2 * (tokens * layers + output) + _attention(config) * (tokens * (tokens + 1) // 2)


def _attention(config: ModelConfig) -> int:
    """Operations for each token that a token sees."""
    return 4 * config.num_layers * config.num_heads * config.head_dim


def _matrix_numbers(config: ModelConfig) -> tuple[int, int]:
    """The number of weights in the matrices of all layers and in the output matrix."""
    heads = 2 * (config.num_heads + config.num_kv_heads)
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return config.num_layers * layer, config.hidden_size * config.vocab_size
