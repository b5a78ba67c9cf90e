"""The processor time of an engine for some generations, with greedy tokens of a fixed number."""

from __future__ import annotations

import time
from collections.abc import Iterable

from llorch_worker.contract import GenerationRequest
from llorch_worker.engine import Engine


def processor_s(engine: Engine, prompts: Iterable[list[int]], new_tokens: int) -> float:
    """Seconds of this process for ``new_tokens`` after each of ``prompts``, submitted at once."""
    began_s = time.process_time()
    generations = [
        engine.submit(
            GenerationRequest(
                prompt_token_ids=prompt, max_tokens=new_tokens, temperature=0, ignore_eos=True
            )
        )
        for prompt in prompts
    ]
    for generation in generations:
        generation.result()
    return time.process_time() - began_s
