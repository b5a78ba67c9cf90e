"""Hugging Face transformers: continuous batching by ``generate_batch``."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

from benches.peers.contestants.contestant import Rate, Ready, Terms, Work, rate
from benches.peers.contestants.generate import generation_config, load_model

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


class ContinuousBatchingContestant:
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
