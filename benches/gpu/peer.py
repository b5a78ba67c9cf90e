"""transformers' continuous batching with the same shape and work, in the same process."""

from __future__ import annotations

from typing import Any

import torch

from benches.gpu.figures import PeerFigures
from llorch_worker.model import LlamaConfig

NEW_TOKENS = 64
STEP_TOKENS = 2048


def measure_peer(
    config: LlamaConfig, *, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> PeerFigures:
    """Greedy decode; half of its tokens come before a sequence holds ``context`` tokens.

    Errors of transformers propagate.
    """
    from transformers import GenerationConfig

    from benches.peers.contestants.continuous_batching import batching_config

    prompt = max(1, context - NEW_TOKENS // 2)
    ended = _random_model(config, dtype, device).generate_batch(
        [[(7 * row + i) % config.vocab_size for i in range(prompt)] for row in range(batch)],
        generation_config=GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=batching_config(
            sequences=batch, tokens=prompt + NEW_TOKENS, step_tokens=STEP_TOKENS
        ),
        record_timestamps=True,
    )
    outputs = list(ended.values())
    errors = [output.error for output in outputs if output.error is not None]
    if errors or len(outputs) != batch:
        raise RuntimeError(errors[0] if errors else "generate_batch ended without all results")
    times = [output.timestamps for output in outputs]
    # The span in which all decode: from the latest first token to the earliest last token.
    from_s, to_s = max(each[0] for each in times), min(each[-1] for each in times)
    tokens = sum(from_s < at <= to_s for each in times for at in each)
    return PeerFigures(batch, context, tokens / (to_s - from_s))


def _random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import LlamaConfig as PeerConfig
    from transformers import LlamaForCausalLM

    with device:
        return LlamaForCausalLM._from_config(
            PeerConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_context,
                tie_word_embeddings=False,
            ),
            attn_implementation="paged|sdpa",
            dtype=dtype,
        ).eval()
