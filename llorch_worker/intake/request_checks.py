"""Checks a request against the model: token ids and sizes."""

from __future__ import annotations

from collections.abc import Iterable

from llorch_worker.contract import (
    ContextLengthExceeded,
    Fault,
    GenerationRequest,
    InvalidRequest,
    JobRequest,
    ModelNotServed,
    shown,
)
from llorch_worker.contract.request import PROMPT_FIELDS
from llorch_worker.intake.prepared import Limits
from llorch_worker.misspelt import did_you_mean, meant
from llorch_worker.text import ChatOptions, Tokenizer, TooManyTokens

MAX_PROMPT_LOGPROBS = 2**18
"""Log probabilities of a whole prompt, the alternatives included: some 20 MB of result. That is a
context of 131,072 tokens with one alternative each, or 12,483 tokens with 20."""


def check_model(request: JobRequest, served: str) -> None:
    """Raises ``ModelNotServed`` if the request names another model than ``served``."""
    if request.model not in (None, served):
        sentence = f"this engine serves {served}, not {shown(request.model)}"
        right = meant(request.model, [served])
        raise ModelNotServed(did_you_mean(right, sentence), retriable=False)


def checked_prompt(
    request: GenerationRequest, tokenizer: Tokenizer, limits: Limits, generated: int
) -> tuple[GenerationRequest, list[int]]:
    """The request, with the ``max_tokens`` that fit; and the ids of the prompt, from any of its
    prompt fields.

    ``generated``: the tokens of earlier attempts. Raises ``InvalidRequest`` with every rule of this
    model that the request breaks, or ``ContextLengthExceeded`` if only its size is wrong.
    """
    prompt_field = next(name for name in PROMPT_FIELDS if getattr(request, name) is not None)
    limit, what = limits.max_context, "the context"
    if limits.pool_tokens < limit:
        limit, what = limits.pool_tokens, "the KV cache"
    prompt_ids: list[int] = []
    try:
        prompt_ids = _tokenise(request, tokenizer, limit)
        tokens, at_least = len(prompt_ids), ""
    except TooManyTokens as too_many:
        tokens, at_least = too_many.at_least, "at least "
    faults = [
        # Text is checked too: a vocabulary may have more tokens than the model has embeddings.
        *_unknown_ids(prompt_field, prompt_ids, limits.vocab_size),
        *_unknown_ids("logit_bias", request.logit_bias or (), limits.vocab_size),
        *_unknown_ids("stop_token_ids", request.stop_token_ids, limits.vocab_size),
    ]
    if not tokens:
        faults.append(
            Fault(field=prompt_field, rule="must have at least one token", got="0 tokens")
        )
    least = max(request.least_tokens, generated)
    too_long = tokens + least > limit
    if too_long:
        faults.append(
            Fault(
                field=prompt_field if request.cut_max_tokens else f"{prompt_field} + max_tokens",
                rule=f"must be at most {limit} tokens, {what} of this model",
                got=f"{at_least}{tokens} + {least} tokens",
            )
        )
    if request.prompt_logprobs is not None:
        each = 1 + request.prompt_logprobs
        if tokens * each > MAX_PROMPT_LOGPROBS:
            faults.append(
                Fault(
                    field="prompt_logprobs",
                    rule="the prompt's tokens x (1 + prompt_logprobs) must be at most "
                    f"{MAX_PROMPT_LOGPROBS}",
                    got=f"{at_least}{tokens} x {each}",
                )
            )
    if too_long and len(faults) == 1:
        raise ContextLengthExceeded.of(
            limit, tokens, least, at_least=bool(at_least), fault=faults[0]
        )
    if faults:
        raise InvalidRequest.from_faults(faults)
    wanted, room = request.most_tokens, limit - tokens
    most = room if wanted is None else min(wanted, room)
    return request.model_copy(update={"max_tokens": most}), prompt_ids


def _tokenise(request: GenerationRequest, tokenizer: Tokenizer, at_most: int) -> list[int]:
    if request.prompt_token_ids is not None:
        return list(request.prompt_token_ids)
    if request.messages is not None:
        tools = () if request.tool_choice == "none" else request.tools
        options = ChatOptions.of(request)
        return tokenizer.encode_chat(request.messages, tools, at_most=at_most, options=options)
    prompt, special = request.prompt, request.parse_special
    assert prompt is not None
    if special is None and request.prompt_logprobs is not None and tokenizer.has_control(prompt):
        rule = "must be true or false: the prompt has the spelling of a control token"
        raise InvalidRequest.from_fault("parse_special", rule, "null")
    return tokenizer.encode(prompt, request.add_special_tokens, bool(special), at_most=at_most)


def _unknown_ids(field: str, ids: Iterable[int], vocab_size: int) -> list[Fault]:
    unknown = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if not unknown:
        return []
    rule = f"token ids must be below {vocab_size}, the vocabulary's size"
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    return [Fault(field=field, rule=rule, got=f"{unknown[0]}{more}")]
