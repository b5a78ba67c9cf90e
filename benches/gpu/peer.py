"""transformers' continuous batching with the same shape and work, in the same process."""

from __future__ import annotations

import torch

from llorch_worker.model import ModelConfig

NEW_TOKENS = 64
STEP_TOKENS = 2048


def measure_peer(
    config: ModelConfig, *, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Tokens/s of a greedy decode; half of its tokens come before ``context`` are held.

    Errors of transformers propagate.
    """
    from transformers import LlamaForCausalLM

    from benches.peers.contestants.contestant import Work, rate
    from benches.peers.contestants.transformers import token_times_s, transformers_config

    with device:
        model = LlamaForCausalLM._from_config(
            transformers_config(config), attn_implementation="paged|sdpa", dtype=dtype
        ).eval()
    prompt = max(1, context - NEW_TOKENS // 2)
    prompts = tuple(
        tuple((7 * row + place) % config.vocab_size for place in range(prompt))
        for row in range(batch)
    )
    work = Work("decode", prompts, NEW_TOKENS, seed=0)
    times = token_times_s(model, work, NEW_TOKENS, STEP_TOKENS)
    return rate(work, *times).tokens_per_s
