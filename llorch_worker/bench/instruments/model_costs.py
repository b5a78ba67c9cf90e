"""The least that a forward pass must read and compute, from the model's shape.

Intermediate results are left out, so that shares of the machine's ceilings are never too high.
"""

from __future__ import annotations

from llorch_worker.engine import Engine


def decode_step_bytes(engine: Engine, sequences: int, context_tokens: float) -> float:
    """Bytes that one decode step reads: the weights once, and each sequence's keys and values.

    ``context_tokens``: the mean length of a sequence.
    """
    config, dtype = engine.config, engine.cache.kv.dtype
    weights = engine.stats().bytes["weights"]
    if not config.tie_word_embeddings:
        # A step reads single rows of the input embedding.
        weights -= config.vocab_size * config.hidden_size * dtype.itemsize
    kv_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return weights + sequences * context_tokens * kv_token


def prefill_flops(engine: Engine, prompts: int, prompt_tokens: int) -> float:
    """Floating-point operations of a causal prefill with logits for each prompt's last token.

    A multiplication and an addition count as two.
    """
    config = engine.config
    heads = 2 * (config.num_heads + config.num_kv_heads)
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    matrices = 2 * config.num_layers * layer * prompt_tokens
    pairs = prompt_tokens * (prompt_tokens + 1) / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    output = 2 * config.vocab_size * config.hidden_size
    return prompts * (matrices + attention + output)
