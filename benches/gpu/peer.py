"""transformers' continuous batching on the same shape, for the same work, in the same process."""

from __future__ import annotations

import time

import torch

from llorch_worker.model import LlamaConfig


def continuous_batching_tokens_per_s(
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
    page = 64
    pages = -(-(context + new_tokens) // page) + 1
    began = time.perf_counter()
    ended = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page,
            num_blocks=batch * pages,
            max_batch_tokens=max(2048, batch),
            allow_block_sharing=False,
        ),
        record_timestamps=True,
    )
    times = [output.timestamps for output in ended.values()]
    if len(times) != batch:
        raise RuntimeError(f"generate_batch ended after {time.perf_counter() - began:.0f} s early")
    from_s, to_s = max(each[0] for each in times), min(each[-1] for each in times)
    tokens: int = sum(from_s < at <= to_s for each in times for at in each)
    return tokens / float(to_s - from_s)
