"""The answer to ``/v1/chat/completions``, at once and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from llorch_worker.contract import (
    Choice,
    Finished,
    FinishReason,
    GenerationResult,
    Started,
    Tokens,
    ToolCall,
)
from llorch_worker.openai_api.chunk_usage import ChunkUsage
from llorch_worker.openai_api.logprobs import ChatLogprobs, chat_logprobs
from llorch_worker.openai_api.sampling import StreamOptions
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
    tool_calls: NotRequired[list[AnswerCall]]


class ChatChoice(Finish):
    index: int
    message: Answer
    logprobs: ChatLogprobs | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageDocument
    system_fingerprint: None


def chat_completion(result: GenerationResult, created: int) -> ChatCompletion:
    return {
        "id": chat_id(result.id),
        "object": "chat.completion",
        "created": created,
        "model": result.model,
        "choices": [_choice(choice) for choice in result.choices],
        "usage": usage_document([result.usage]),
        "system_fingerprint": None,
    }


def chat_id(job_id: str) -> str:
    return f"chatcmpl-{job_id}"


def _choice(choice: Choice) -> ChatChoice:
    message: Answer = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [_call(call) for call in choice.tool_calls]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
        **finish(choice.finish_reason),
    }


def _call(call: ToolCall) -> AnswerCall:
    function: AnswerFunction = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatChunks:
    """See :class:`llorch_worker.openai_api.body.Chunks`."""

    def __init__(
        self,
        job_id: str,
        created: int,
        *,
        n: int,
        may_call: bool,
        options: StreamOptions | None,
    ) -> None:
        """``may_call``: there are tools, so a text may be a call of one."""
        self.needs_results = n > 1 or may_call
        self._same: dict[str, Any] = {
            "id": chat_id(job_id),
            "object": "chat.completion.chunk",
            "created": created,
            "model": "",
            "system_fingerprint": None,
        }
        self._may_call = may_call
        self._usage = ChunkUsage(options)
        self._begun: set[int] = set()

    def started(self, job: int, event: Started) -> None:
        self._same["model"] = event.model
        self._usage.started(job, event)

    def tokens(self, job: int, event: Tokens) -> Iterator[dict[str, Any]]:
        self._usage.tokens(job, event)
        yield from self._begin(event.choice)
        logprobs = None if event.logprobs is None else chat_logprobs(event.logprobs)
        if (event.text or logprobs) and not self._may_call:
            yield self._chunk(event.choice, {"content": event.text}, logprobs)

    def finished(
        self, job: int, event: Finished, result: GenerationResult | None
    ) -> Iterator[dict[str, Any]]:
        self._usage.finished(job, event.usage)
        if result is None:
            yield from self._finish(0, event.finish_reason)
            return
        for choice in result.choices:
            if self._may_call:
                yield from self._calls(choice)
            yield from self._finish(choice.index, choice.finish_reason)

    def end(self) -> Iterator[dict[str, Any]]:
        if self._usage.in_the_end:
            yield {**self._same, "choices": [], "usage": self._usage.document()}

    def _begin(self, choice: int) -> Iterator[dict[str, Any]]:
        if choice not in self._begun:
            self._begun.add(choice)
            yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})

    def _calls(self, choice: Choice) -> Iterator[dict[str, Any]]:
        yield from self._begin(choice.index)
        if choice.text:
            yield self._chunk(choice.index, {"content": choice.text})
        for number, call in enumerate(choice.tool_calls or ()):
            whole = _call(call)
            begin = {**whole, "function": {**whole["function"], "arguments": ""}}
            yield self._chunk(choice.index, {"tool_calls": [{"index": number, **begin}]})
            rest = {"index": number, "function": {"arguments": whole["function"]["arguments"]}}
            yield self._chunk(choice.index, {"tool_calls": [rest]})

    def _finish(self, choice: int, reason: FinishReason) -> Iterator[dict[str, Any]]:
        yield from self._begin(choice)
        yield self._chunk(choice, {}, None, finish(reason))

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: ChatLogprobs | None = None,
        end: Finish = {"finish_reason": None},  # noqa: B006 - nobody changes it
    ) -> dict[str, Any]:
        body = {"index": choice, "delta": delta, "logprobs": logprobs, **end}
        return {**self._same, "choices": [body], **self._usage.fields()}
