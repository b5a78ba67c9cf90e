"""onnxruntime-genai's Generator on a batch of prompts of equal length."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import onnxruntime_genai

from benches.peers.contestants.contestant import Rate, Ready, Terms, Work
from benches.peers.contestants.token_times import rate


class OnnxRuntimeContestant:
    """Greedy decoding of a static batch, with a KV cache for prompt and new tokens."""

    def __init__(self, terms: Terms) -> None:
        config = onnxruntime_genai.Config(str(terms.model))
        options = {"session_options": {"intra_op_num_threads": terms.threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model: Any = onnxruntime_genai.Model(config)
        self.ready = Ready(
            versions={name: version(name) for name in ("onnxruntime-genai", "onnxruntime")},
            note="sampling included",
        )

    def warm_up(self, work: Work) -> None:
        self.run(work.shortened())

    def run(self, work: Work) -> Rate:
        tokens = work.prompt_tokens + work.new_tokens
        params = onnxruntime_genai.GeneratorParams(self._model)
        # Before the least length no token ends a sequence.
        params.set_search_options(
            batch_size=work.sequences, min_length=tokens, max_length=tokens, do_sample=False
        )
        generator: Any = onnxruntime_genai.Generator(self._model, params)
        times_s: list[float] = []
        began_s = time.perf_counter()
        generator.append_tokens(np.array(work.prompts, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            times_s.append(time.perf_counter())
        return rate(work, began_s, [times_s] * work.sequences)
