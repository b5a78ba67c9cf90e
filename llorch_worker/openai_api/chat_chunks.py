"""The answer to ``/v1/chat/completions`` in chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llorch_worker.contract import (
    CallPart,
    Finished,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Started,
    TokenLogprobs,
    Tokens,
)
from llorch_worker.openai_api.chat_answer import chat_id
from llorch_worker.openai_api.chunk_frame import ChunkFrame
from llorch_worker.openai_api.logprobs import SentTokens, chat_logprobs
from llorch_worker.openai_api.sampling import StreamOptions
from llorch_worker.openai_api.usage import finish


@dataclass
class _Sent:
    """Of one choice."""

    begun: bool = False
    """Whether it has had its first chunk, which has the role."""
    tokens: SentTokens = field(default_factory=SentTokens)
    ids: list[int] = field(default_factory=list)
    """Of tokens that no chunk has named yet."""


class ChatChunks:
    """See :class:`llorch_worker.openai_api.body.Chunks`."""

    def __init__(
        self,
        request: GenerationRequest,
        job_id: str,
        created: int,
        options: StreamOptions | None,
        *,
        token_ids: bool = False,
    ) -> None:
        self._token_ids = token_ids
        self._may_call = request.may_call
        # The result alone says what of a schema the text breaks.
        held = request.shapes_text or request.forces_a_call
        self.needs_results = request.n > 1 or held
        self._frame = ChunkFrame(chat_id(job_id), "chat.completion.chunk", created, options)
        self._sent: dict[int, _Sent] = defaultdict(_Sent)

    def started(self, job: int, event: Started) -> None:
        self._frame.started(job, event)

    def tokens(self, job: int, event: Tokens) -> Iterator[dict[str, Any]]:
        self._frame.tokens(job, event)
        yield from self._begin(event.choice)
        tokens = self._sent[event.choice].tokens
        tokens.add(event.logprobs or ())
        self._sent[event.choice].ids += event.ids
        if event.reasoning_content:
            tokens.skip(event.reasoning_content)
            yield self._chunk(event.choice, {"reasoning_content": event.reasoning_content})
        if event.text:
            yield self._chunk(event.choice, {"content": event.text}, tokens.take(event.text))
        for part in event.tool_calls or ():
            yield self._chunk(event.choice, {"tool_calls": [_call_delta(part)]}, tokens.rest())

    def finished(
        self, job: int, event: Finished, result: GenerationResult | None
    ) -> Iterator[dict[str, Any]]:
        self._frame.finished(job, event.usage)
        if result is None:
            yield from self._finish(0, event.finish_reason)
            return
        for choice in result.choices:
            yield from self._finish(choice.index, choice.finish_reason, choice.unmet)

    def end(self) -> Iterator[dict[str, Any]]:
        return self._frame.end()

    def _begin(self, choice: int) -> Iterator[dict[str, Any]]:
        if not self._sent[choice].begun:
            self._sent[choice].begun = True
            content = None if self._may_call else ""
            yield self._chunk(choice, {"role": "assistant", "content": content, "refusal": None})

    def _finish(
        self, choice: int, reason: FinishReason, unmet: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        yield from self._begin(choice)
        chunk = self._chunk(choice, {}, self._sent[choice].tokens.end(), reason)
        if unmet:
            chunk["choices"][0]["llorch_unmet"] = list(unmet)
        yield chunk

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
        if self._token_ids:
            body["token_ids"], self._sent[choice].ids = self._sent[choice].ids, []
        return self._frame.chunk(body)


def _call_delta(part: CallPart) -> dict[str, Any]:
    function = {"arguments": part.arguments}
    if part.id is None:
        return {"index": part.index, "function": function}
    begun = {"id": part.id, "type": "function"}
    return {"index": part.index, **begun, "function": {"name": part.name, **function}}
