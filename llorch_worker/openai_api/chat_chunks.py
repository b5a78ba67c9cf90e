"""The answer to ``/v1/chat/completions`` in chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llorch_worker.contract import (
    Choice,
    Finished,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Started,
    TokenLogprobs,
    Tokens,
)
from llorch_worker.contract.tool_calls import may_be_calls
from llorch_worker.openai_api.chat_answer import answer_call, chat_id
from llorch_worker.openai_api.chunk_usage import ChunkUsage
from llorch_worker.openai_api.fingerprint import system_fingerprint
from llorch_worker.openai_api.logprobs import chat_logprobs
from llorch_worker.openai_api.sampling import StreamOptions
from llorch_worker.openai_api.usage import finish


@dataclass
class _Unsent:
    """What is held back of one choice, while its text may be calls of tools."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    begun: bool = False
    """Whether the choice has had its first chunk, which has the role."""
    is_text: bool = False
    """Whether its text cannot be calls, so that it is sent as it comes."""


class ChatChunks:
    """See :class:`llorch_worker.openai_api.body.Chunks`."""

    def __init__(
        self,
        request: GenerationRequest,
        job_id: str,
        created: int,
        options: StreamOptions | None,
    ) -> None:
        self._request = request
        self._may_call = may_be_calls("", request)
        self.needs_results = request.n > 1 or self._may_call
        self._same: dict[str, Any] = {
            "id": chat_id(job_id),
            "object": "chat.completion.chunk",
            "created": created,
            "model": "",
            "system_fingerprint": None,
        }
        self._usage = ChunkUsage(options)
        self._unsent: dict[int, _Unsent] = defaultdict(_Unsent)

    def started(self, job: int, event: Started) -> None:
        self._same["model"] = event.model
        self._same["system_fingerprint"] = system_fingerprint(event)
        self._usage.started(job, event)

    def tokens(self, job: int, event: Tokens) -> Iterator[dict[str, Any]]:
        self._usage.tokens(job, event)
        yield from self._begin(event.choice)
        if event.reasoning_content:
            yield self._chunk(event.choice, {"reasoning_content": event.reasoning_content})
        unsent = self._unsent[event.choice]
        unsent.text += event.text
        unsent.logprobs += event.logprobs or ()
        unsent.is_text = unsent.is_text or not may_be_calls(unsent.text, self._request)
        if unsent.is_text:
            yield from self._send(event.choice)

    def finished(
        self, job: int, event: Finished, result: GenerationResult | None
    ) -> Iterator[dict[str, Any]]:
        self._usage.finished(job, event.usage)
        if result is None:
            yield from self._finish(0, event.finish_reason)
            return
        for choice in result.choices:
            yield from self._begin(choice.index)
            if choice.tool_calls:
                yield from self._calls(choice)
            else:
                yield from self._send(choice.index)
            yield from self._finish(choice.index, choice.finish_reason)

    def end(self) -> Iterator[dict[str, Any]]:
        if self._usage.in_the_end:
            yield {**self._same, "choices": [], "usage": self._usage.document()}

    def _begin(self, choice: int) -> Iterator[dict[str, Any]]:
        if not self._unsent[choice].begun:
            self._unsent[choice].begun = True
            content = None if self._may_call else ""
            yield self._chunk(choice, {"role": "assistant", "content": content, "refusal": None})

    def _send(self, choice: int) -> Iterator[dict[str, Any]]:
        unsent = self._unsent[choice]
        if unsent.text or unsent.logprobs:
            yield self._chunk(choice, {"content": unsent.text}, unsent.logprobs)
            unsent.text, unsent.logprobs = "", []

    def _calls(self, choice: Choice) -> Iterator[dict[str, Any]]:
        for number, call in enumerate(choice.tool_calls or ()):
            whole = answer_call(call)
            arguments = whole["function"]["arguments"]
            begin = {**whole, "function": {**whole["function"], "arguments": ""}}
            for part in (begin, {"function": {"arguments": arguments}}):
                yield self._chunk(choice.index, {"tool_calls": [{"index": number, **part}]})

    def _finish(self, choice: int, reason: FinishReason) -> Iterator[dict[str, Any]]:
        yield from self._begin(choice)
        yield self._chunk(choice, {}, self._unsent[choice].logprobs, reason)

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: list[TokenLogprobs] | None = None,
        reason: FinishReason | None = None,
    ) -> dict[str, Any]:
        end = {"finish_reason": None} if reason is None else finish(reason)
        body = {
            "index": choice,
            "delta": delta,
            "logprobs": chat_logprobs(logprobs) if logprobs else None,
            **end,
        }
        return {**self._same, "choices": [body], **self._usage.fields()}
