"""CTranslate2's Generator on a batch of prompts of equal length."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from typing import Any

import ctranslate2

from benches.peers.contestants.contestant import Rate, Ready, Terms, Work
from benches.peers.contestants.token_times import rate


class CTranslate2Contestant:
    """Greedy decoding of a static batch, with the weights as the conversion stored them."""

    def __init__(self, terms: Terms) -> None:
        self._generator: Any = ctranslate2.Generator(
            str(terms.model), device="cpu", inter_threads=1, intra_threads=terms.threads
        )
        self._tokens: list[str] = json.loads((terms.model / "vocabulary.json").read_text())
        self.ready = Ready(
            versions={"ctranslate2": version("ctranslate2")},
            note=f"computes in {self._generator.compute_type}, sampling included",
        )

    def warm_up(self, work: Work) -> None:
        self.run(work.shortened())

    def run(self, work: Work) -> Rate:
        prompts = [[self._tokens[token] for token in prompt] for prompt in work.prompts]
        times_s: list[list[float]] = [[] for _ in prompts]

        def note(step: Any) -> bool:
            times_s[step.batch_id].append(time.perf_counter())
            return False

        began_s = time.perf_counter()
        self._generator.generate_batch(
            prompts,
            beam_size=1,
            sampling_topk=1,
            # Before the least length no token ends a sequence.
            min_length=work.new_tokens,
            max_length=work.new_tokens,
            include_prompt_in_result=False,
            callback=note,
        )
        return rate(work, began_s, times_s)
