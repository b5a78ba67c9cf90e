"""Tokens used, and why a choice ended, as OpenAI gives them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from llorch_worker.contract import FinishReason, Usage

OpenAIReason = Literal["stop", "length", "tool_calls", "content_filter"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    """Tokens that the worker had guessed, from ``prediction`` or otherwise."""


class UsageDocument(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_document(usages: Iterable[Usage]) -> UsageDocument:
    """The sum over all jobs of a request."""
    usages = tuple(usages)
    prompt = sum(usage.prompt for usage in usages)
    completion = sum(usage.completion for usage in usages)
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached for usage in usages)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning for usage in usages),
            "accepted_prediction_tokens": accepted,
        },
    }


class Finish(TypedDict):
    """``llorch_finish_reason`` is the contract's, where OpenAI has no such reason."""

    finish_reason: OpenAIReason | None
    llorch_finish_reason: NotRequired[FinishReason]


def finish(reason: FinishReason) -> Finish:
    """A text that its deadline or a cancel cut off is one that has met a limit."""
    if reason == "deadline" or reason == "cancelled":
        return {"finish_reason": "length", "llorch_finish_reason": reason}
    return {"finish_reason": reason}
