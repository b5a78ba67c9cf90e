"""The answer to ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from llorch_worker.contract import (
    Choice,
    GenerationResult,
    TokenLogprobs,
    ToolCall,
)
from llorch_worker.openai_api.fingerprint import TakenConfig, system_fingerprint, taken_config
from llorch_worker.openai_api.logprobs import (
    ChatLogprobs,
    PromptToken,
    chat_logprobs,
    sent_logprobs,
)
from llorch_worker.openai_api.usage import Finish, UsageDocument, finish, usage_document


class AnswerFunction(TypedDict):
    name: str
    arguments: str


class AnswerCall(TypedDict):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class Answer(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[AnswerCall]]


class Unmet(TypedDict):
    llorch_unmet: NotRequired[list[str]]
    """Rules of a schema that no grammar holds and that the answer breaks."""


class ChatChoice(Finish, Unmet):
    index: int
    message: Answer
    logprobs: ChatLogprobs | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TakenConfig):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageDocument
    system_fingerprint: str | None
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptToken] | None]]


def chat_completion(result: GenerationResult, created: int) -> ChatCompletion:
    return {
        "id": chat_id(result.id),
        "object": "chat.completion",
        "created": created,
        "model": result.model,
        "choices": [_choice(choice) for choice in result.choices],
        "usage": usage_document([result.usage]),
        "system_fingerprint": system_fingerprint(result),
        **taken_config(result),  # type: ignore[typeddict-item]
    }


def chat_id(job_id: str) -> str:
    return f"chatcmpl-{job_id}"


def _choice(choice: Choice) -> ChatChoice:
    message: Answer = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning_content:
        message["reasoning_content"] = choice.reasoning_content
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [answer_call(call) for call in choice.tool_calls]
    logprobs: Sequence[TokenLogprobs] | None = choice.logprobs
    if logprobs is not None and not choice.tool_calls:
        logprobs = sent_logprobs(logprobs, choice.reasoning_content, choice.text)
    unmet: Unmet = {"llorch_unmet": list(choice.unmet)} if choice.unmet else {}
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None if logprobs is None else chat_logprobs(logprobs),
        **finish(choice.finish_reason),
        # mypy takes it for one that may have what is not required here.
        **unmet,  # type: ignore[typeddict-item]
    }


def answer_call(call: ToolCall) -> AnswerCall:
    function: AnswerFunction = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}
