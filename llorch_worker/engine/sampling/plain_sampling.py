"""The one rule on which jobs' steps may overlap, and which the fused sampling kernel serves.

A job samples plainly that asks for a temperature, greedy or not, and for nothing else. What all
others ask for needs numbers of the host's between two steps (log probabilities are read back,
penalties and min_tokens count tokens, the searches of the cuts look at their own results), so a
step with one of them in it ends before the next begins.
"""

from __future__ import annotations

from llorch_worker.contract import GenerationRequest


def samples_plainly(request: GenerationRequest) -> bool:
    """Whether ``request`` asks for no cut, penalty, bias, least length or log probabilities."""
    return (
        request.top_k == 0
        and request.top_p == 1
        and request.min_p == 0
        and request.repetition_penalty == 1
        and request.presence_penalty == 0
        and request.frequency_penalty == 0
        and not request.logit_bias
        and request.min_tokens == 0
        and request.logprobs is None
    )
