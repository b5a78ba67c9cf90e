"""Hugging Face transformers: continuous batching by ``generate_batch``."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.initialization import no_init_weights

from benches.peers.contestants.contestant import Rate, Ready, Terms, Work, rate
from llorch_worker.model import ModelConfig as OurConfig
from llorch_worker.model import resolve_config
from llorch_worker.model.config import Graph
from llorch_worker.model.weight_table import layer_weights
from llorch_worker.weights import open_checkpoint

NO_TOKEN = -1
"""So that no token ends a sequence."""
PAGE_TOKENS = 64


def batching_config(*, sequences: int, tokens: int, step_tokens: int) -> ContinuousBatchingConfig:
    """The config for this many sequences, tokens per sequence and tokens per step."""
    pages = -(-tokens // PAGE_TOKENS) + 1
    page: dict[str, Any] = {page_option(ContinuousBatchingConfig): PAGE_TOKENS}
    return ContinuousBatchingConfig(
        **page,
        num_blocks=sequences * pages,
        max_batch_tokens=max(step_tokens, sequences),
        allow_block_sharing=False,
    )


def page_option(config: Any) -> str:
    """The field for a page's tokens in ``config``, transformers' ContinuousBatchingConfig."""
    known = {field.name for field in fields(config)}
    # transformers 5.23 renamed it.
    for name in ("page_size", "block_size"):
        if name in known:
            return name
    raise ValueError("its ContinuousBatchingConfig has neither page_size nor block_size")


class TransformersContestant:
    """Greedy decoding with transformers' own paged KV cache."""

    def __init__(self, terms: Terms) -> None:
        torch.set_num_threads(terms.threads)
        self._terms = terms
        self._model = load_model(terms)
        self.ready = Ready(
            versions={"transformers": version("transformers")},
            note=f"{terms.dtype}, dequantised, paged attention by torch",
        )

    def warm_up(self, work: Work) -> None:
        self._times(work, work.warm_up_tokens)

    def run(self, work: Work) -> Rate:
        return rate(work, *self._times(work, work.new_tokens))

    def _times(self, work: Work, new_tokens: int) -> tuple[float, list[list[float]]]:
        return token_times_s(self._model, work, new_tokens, self._terms.prefill_tokens)


def token_times_s(
    model: Any, work: Work, new_tokens: int, step_tokens: int
) -> tuple[float, list[list[float]]]:
    """The start of the first sequence, and for each sequence the times of its tokens.

    transformers allocates its cache again each time, before the start, so no figure has it.
    """
    ended: dict[str, Any] = model.generate_batch(
        [list(prompt) for prompt in work.prompts],
        generation_config=generation_config(max_new_tokens=new_tokens, eos_token_id=NO_TOKEN),
        continuous_batching_config=batching_config(
            sequences=work.sequences,
            tokens=work.prompt_tokens + new_tokens,
            step_tokens=step_tokens,
        ),
        record_timestamps=True,
    )
    outputs = list(ended.values())
    errors = [each.error for each in outputs if each.error is not None]
    if errors or len(outputs) != work.sequences:
        raise RuntimeError(errors[0] if errors else "generate_batch ended without results")
    return min(each.lifespan[0] for each in outputs), [each.timestamps for each in outputs]


def load_model(terms: Terms) -> Any:
    """transformers' own Llama with the file's weights, dequantised to ``terms.dtype``.

    Our reader fills it, because transformers' GGUF reader needs another package and twice the
    memory. Only transformers computes.
    """
    checkpoint = open_checkpoint(terms.model)
    ours = resolve_config(checkpoint)
    if ours.graph != Graph() or ours.ropes[0].scaling is not None:
        raise ValueError("not a Llama, or one that scales RoPE: measured without only")
    config = transformers_config(ours)
    with no_init_weights():
        make: Any = LlamaForCausalLM._from_config
        model = make(config, dtype=getattr(torch, terms.dtype), attn_implementation="sdpa")
    model.tie_weights()
    orders = {
        part.name: part.order
        for layer in range(ours.num_layers)
        for part in layer_weights(ours, layer).qkv.parts
    }
    for name, parameter in model.named_parameters():
        checkpoint.read_into(name, parameter.data, orders.get(name))
    model.generation_config = generation_config(max_new_tokens=None, eos_token_id=None)
    return model.eval()


def transformers_config(ours: OurConfig) -> LlamaConfig:
    """``ours`` in transformers' words, without scaled RoPE."""
    return LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.ropes[0].theta},
        max_position_embeddings=ours.max_context,
        tie_word_embeddings=ours.tie_word_embeddings,
    )


def generation_config(**options: Any) -> Any:
    """A greedy config without penalties or logits processors."""
    make: Any = GenerationConfig
    return make(do_sample=False, pad_token_id=0, **options)
