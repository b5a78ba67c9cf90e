"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from llorch_worker.contract import (
    Fault,
    Function,
    GenerationRequest,
    GenerationResult,
    Tool,
    ToolChoice,
    describe,
)
from llorch_worker.contract.request import MAX_MESSAGES
from llorch_worker.openai_api.body import OpenAIBody
from llorch_worker.openai_api.chat_answer import ChatCompletion, chat_completion
from llorch_worker.openai_api.chat_chunks import ChatChunks
from llorch_worker.openai_api.chat_message import ChatMessage, turns_of
from llorch_worker.openai_api.known_fields import OF_OTHERS_THAN_CHATS
from llorch_worker.openai_api.logprobs import prompt_logprobs
from llorch_worker.openai_api.shape import ReasoningEffort, generation_request, with_effort
from llorch_worker.openai_api.spelling import slips_of

TEMPLATE_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class ChatRequest(OpenAIBody):
    """OpenAI's request, with our own fields beside it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 32}
            ]
        }
    )
    of_others = OF_OTHERS_THAN_CHATS

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: SkipValidation[int | None] = None
    """By default that of the gateway; at most what the context holds beside the prompt."""
    max_tokens: SkipValidation[int | None] = None
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    top_logprobs: SkipValidation[int | None] = None
    """With logprobs: how many alternatives of each token."""
    tools: SkipValidation[list[Tool] | None] = None
    tool_choice: SkipValidation[ToolChoice | None] = None
    parallel_tool_calls: SkipValidation[bool | None] = None
    reasoning_effort: ReasoningEffort | None = None
    """For the chat template, as ``reasoning_effort`` and as ``enable_thinking``, which is false for
    "none" and else true."""
    chat_template_kwargs: SkipValidation[dict[str, Any] | None] = None
    """Variables for the chat template, which go before reasoning_effort."""
    add_generation_prompt: SkipValidation[bool | None] = None
    continue_final_message: SkipValidation[bool | None] = None
    """Whether the answer goes on in the last message, which is an assistant's."""
    add_special_tokens: Literal[False] | None = None
    """The template writes them."""
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    def to_requests(self) -> list[GenerationRequest]:
        fields = self.passed_on() | {name: getattr(self, name) for name in TEMPLATE_FIELDS}
        fields |= {
            "chat_template_kwargs": with_effort(self.chat_template_kwargs, self.reasoning_effort),
            "messages": turns_of(self.messages),
            "max_tokens": self.max_tokens,
            "prompt_logprobs": self.prompt_logprobs,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "response_format": self.response_format,
            "tools": tools_of(self.tools),
            # Clients send OpenAI's default without tools too.
            "tool_choice": self.tool_choice if self.tools or self.tool_choice != "auto" else None,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        return [generation_request(fields, names, [*self.refusals(), *self._faults()])]

    def answer(self, results: Sequence[GenerationResult], created: int) -> ChatCompletion:
        document = chat_completion(results[0], created)
        if self.prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs(results[0].prompt_logprobs or ())
        if self.return_token_ids:
            for given, choice in zip(document["choices"], results[0].choices, strict=True):
                given["token_ids"] = list(choice.token_ids)
        return document

    def chunks(
        self, requests: Sequence[GenerationRequest], job_id: str, created: int
    ) -> ChatChunks:
        ids = bool(self.return_token_ids)
        return ChatChunks(requests[0], job_id, created, self.stream_options, token_ids=ids)

    def with_prompt_ids(
        self, document: Mapping[str, Any], ids: Sequence[Sequence[int]], told: set[int]
    ) -> Mapping[str, Any]:
        if 0 in told:
            return document
        told.add(0)
        return {**document, "prompt_token_ids": list(ids[0])}

    def _faults(self) -> list[Fault]:
        faults = super()._faults()
        if self.top_logprobs and not self.logprobs:
            got = describe(self.top_logprobs)
            faults.append(Fault(field="top_logprobs", rule="needs logprobs: true", got=got))
        both = None not in (self.max_tokens, self.max_completion_tokens)
        if both and self.max_tokens != self.max_completion_tokens:
            rule = "must be the same, if both are given"
            faults.append(Fault(field="max_tokens | max_completion_tokens", rule=rule, got="both"))
        return faults


_PARAMETERS = {"input_schema", "inputSchema"}
"""As other services call a function's parameters: without them it would be another function."""


def tools_of(tools: Any) -> Any:
    """A client's ``tools`` for the contract: what else stands beside a function, such as
    ``cache_control``, or in it, such as ``return``, says nothing to the model."""
    if not isinstance(tools, list):
        return tools
    known = [_known(Tool, tool) for tool in tools]
    return [
        {**tool, "function": _known(Function, tool["function"])}
        if isinstance(tool, dict) and "function" in tool
        else tool
        for tool in known
    ]


def _known(kind: type[BaseModel], document: Any) -> Any:
    """What of ``document`` the contract reads, and the slips, which it refuses."""
    if not isinstance(document, dict):
        return document
    names = kind.model_fields.keys() | slips_of(kind, document).keys()
    if kind is Function:
        names |= _PARAMETERS
    return {name: value for name, value in document.items() if name in names}
