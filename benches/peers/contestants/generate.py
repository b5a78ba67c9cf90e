"""Hugging Face transformers: ``generate`` on a batch of prompts of equal length."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.initialization import no_init_weights

from benches.peers.contestants.contestant import Rate, Ready, Terms, Work, rate
from llorch_worker.model import ModelConfig as OurConfig
from llorch_worker.model import resolve_config
from llorch_worker.model.config import Graph
from llorch_worker.model.weight_table import layer_weights
from llorch_worker.weights import open_checkpoint


class GenerateContestant:
    """Greedy decoding with transformers' own KV cache and torch's attention."""

    def __init__(self, terms: Terms) -> None:
        torch.set_num_threads(terms.threads)
        self._model = load_model(terms)
        self.ready = Ready(
            versions={"transformers": version("transformers")},
            note=f"{terms.dtype}, dequantised, torch's attention",
        )

    def warm_up(self, work: Work) -> None:
        self._token_times_s(work, work.warm_up_tokens)

    def run(self, work: Work) -> Rate:
        began_s = time.perf_counter()
        times_s = self._token_times_s(work, work.new_tokens)
        return rate(work, began_s, [times_s] * work.sequences)

    def _token_times_s(self, work: Work, new_tokens: int) -> list[float]:
        """The end times of the steps of all sequences."""
        times_s: list[float] = []
        ids = torch.tensor(work.prompts)
        self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([_Clock(times_s)]),
        )
        return times_s


class _Clock(StoppingCriteria):
    """Never stops a generation; transformers calls it after every step."""

    def __init__(self, times_s: list[float]) -> None:
        self._times_s = times_s

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002
        self._times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


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
