"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, SkipValidation

from llorch_worker.contract import (
    Fault,
    GenerationRequest,
    GenerationResult,
    InvalidRequest,
    ResponseFormat,
    Tool,
    ToolChoice,
    describe,
)
from llorch_worker.openai_api.body import Body
from llorch_worker.openai_api.chat_answer import ChatCompletion, chat_completion
from llorch_worker.openai_api.chat_chunks import ChatChunks
from llorch_worker.openai_api.shape import ReasoningEffort, Shape, generation_request, with_effort

TEMPLATE_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class TextPart(Shape):
    type: Literal["text"]
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class CalledFunction(Shape):
    name: SkipValidation[str]
    arguments: SkipValidation[str]


class AssistantCall(Shape):
    """A call of an earlier turn, as an answer had it."""

    id: SkipValidation[str]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted and without effect: streams number calls."""


class ChatMessage(Shape):
    """One turn of a chat. Which fields belong to which role, the contract checks."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """A developer's turn is a system's."""
    content: Annotated[
        list[TextPart] | None,
        BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    """Texts in parts are joined by newlines."""
    reasoning_content: SkipValidation[str | None] = None
    """An assistant's thought, as answers have it."""
    tool_calls: list[AssistantCall] | None = None
    tool_call_id: SkipValidation[str | None] = None

    refusal: None = None
    """Answers have it and the fields below, and answers become turns."""
    annotations: None = None
    audio: None = None
    function_call: None = None

    def to_contract(self) -> dict[str, Any]:
        """The fields of the contract's ``Message``."""
        parts = self.content
        calls = self.tool_calls
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": None if parts is None else "\n".join(part.text for part in parts),
            "reasoning_content": self.reasoning_content,
            "tool_calls": calls and [call.model_dump(exclude={"index"}) for call in calls],
            "tool_call_id": self.tool_call_id,
        }


class ChatRequest(Body):
    """OpenAI's request, with our own fields beside it."""

    messages: list[ChatMessage]
    max_completion_tokens: SkipValidation[int | None] = None
    """By default 256; prompt and answer must fit into the context."""
    max_tokens: SkipValidation[int | None] = None
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    top_logprobs: SkipValidation[int | None] = None
    """With logprobs: how many alternatives of each token."""
    response_format: SkipValidation[ResponseFormat | None] = None
    tools: SkipValidation[list[Tool] | None] = None
    tool_choice: SkipValidation[ToolChoice | None] = None
    parallel_tool_calls: SkipValidation[bool | None] = None
    reasoning_effort: ReasoningEffort | None = None
    """For the chat template, as ``reasoning_effort`` and, unless it is "none", as
    ``enable_thinking``."""
    chat_template_kwargs: SkipValidation[dict[str, Any] | None] = None
    """Variables for the chat template, which go before reasoning_effort."""
    add_generation_prompt: SkipValidation[bool | None] = None
    continue_final_message: SkipValidation[bool | None] = None
    """Whether the answer goes on in the last message, which is an assistant's."""
    modalities: list[Literal["text"]] | None = None
    """Accepted and without effect."""

    def to_requests(self) -> list[GenerationRequest]:
        faults = list(self._faults())
        fields = self.passed_on() | {name: getattr(self, name) for name in TEMPLATE_FIELDS}
        fields |= {
            "chat_template_kwargs": with_effort(self.chat_template_kwargs, self.reasoning_effort),
            "messages": [message.to_contract() for message in self.messages],
            "max_tokens": self.max_tokens,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "response_format": self.response_format,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        try:
            request = generation_request(fields, names)
        except InvalidRequest as error:
            faults += error.faults
        if faults:
            raise InvalidRequest.from_faults(faults)
        return [request]

    def answer(self, results: Sequence[GenerationResult], created: int) -> ChatCompletion:
        return chat_completion(results[0], created)

    def chunks(
        self, requests: Sequence[GenerationRequest], job_id: str, created: int
    ) -> ChatChunks:
        return ChatChunks(requests[0], job_id, created, self.stream_options)

    def _faults(self) -> list[Fault]:
        faults = []
        if self.top_logprobs is not None and not self.logprobs:
            got = describe(self.top_logprobs)
            faults.append(Fault(field="top_logprobs", rule="needs logprobs: true", got=got))
        if None not in (self.max_tokens, self.max_completion_tokens):
            rule = "at most one of them may be given"
            faults.append(Fault(field="max_tokens | max_completion_tokens", rule=rule, got="both"))
        return faults
