"""transformers' continuous batching on the same shape, for the same work, in the same process."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from benches.gpu.figures import PeerFigures
from llorch_worker.model import LlamaConfig

PAGE_TOKENS = 64
NEW_TOKENS = 64


def page_option(config: Any) -> str:
    """What ``config``, transformers' ContinuousBatchingConfig, calls the tokens of a page."""
    known = {field.name for field in fields(config)}
    # 5.23 renamed it.
    for name in ("page_size", "block_size"):
        if name in known:
            return name
    raise ValueError("its ContinuousBatchingConfig has neither page_size nor block_size")


def measure_peer(
    config: LlamaConfig, *, batch: int, context: int, dtype: torch.dtype
) -> PeerFigures:
    """Raises whatever transformers raises: it is not ours to know."""
    rate = _tokens_per_s(config, batch=batch, context=context, new_tokens=NEW_TOKENS, dtype=dtype)
    return PeerFigures(batch, context, rate)


def _tokens_per_s(
    config: LlamaConfig, *, batch: int, context: int, new_tokens: int, dtype: torch.dtype
) -> float:
    """Tokens/s while all ``batch`` sequences decode, from the last first token on."""
    from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM
    from transformers import LlamaConfig as PeerConfig

    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(
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
    prompts = [[(7 * row + i) % config.vocab_size for i in range(context)] for row in range(batch)]
    page: Any = {page_option(ContinuousBatchingConfig): PAGE_TOKENS}
    pages = -(-(context + new_tokens) // PAGE_TOKENS) + 1
    ended = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **page,
            num_blocks=batch * pages,
            max_batch_tokens=max(2048, batch),
            allow_block_sharing=False,
        ),
        record_timestamps=True,
    )
    outputs = list(ended.values())
    errors = [output.error for output in outputs if output.error is not None]
    if errors or len(outputs) != batch:
        raise RuntimeError(errors[0] if errors else "generate_batch ended without all results")
    times = [output.timestamps for output in outputs]
    from_s, to_s = max(each[0] for each in times), min(each[-1] for each in times)
    tokens: int = sum(from_s < at <= to_s for each in times for at in each)
    return tokens / float(to_s - from_s)
