"""The answer to ``/v1/messages``, at once and as events, from that of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from typing_extensions import TypedDict

from llorch_worker.contract import Finished, GenerationResult, Started, Tokens
from llorch_worker.openai_api.chat_answer import ChatCompletion
from llorch_worker.openai_api.chat_chunks import ChatChunks
from llorch_worker.openai_api.usage import UsageDocument

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_SIGNATURE = "llorch"
"""Clients send a thought without one back without its text; nothing checks it here."""
_NO_TEXT = {"type": "text", "text": "", "citations": None}


class MessageUsage(TypedDict):
    input_tokens: int
    """Those that no cache had."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


def message(document: ChatCompletion, stop_string: str | None, *, thoughts: bool) -> Message:
    """``stop_string``: the one that ended the answer. ``thoughts``: whether to show them."""
    (choice,) = document["choices"]
    answer = choice["message"]
    content: list[dict[str, Any]] = []
    if answer["content"]:
        content.append({**_NO_TEXT, "text": answer["content"]})
    for call in answer.get("tool_calls", ()):
        function = call["function"]
        content.append(_tool_use(call["id"], function["name"], _input(function["arguments"])))
    content = content or [_NO_TEXT]
    thought = answer.get("reasoning_content")
    if thought and thoughts:
        content.insert(0, {"type": "thinking", "thinking": thought, "signature": _SIGNATURE})
    empty = _empty_message(document)
    return {**empty, "content": content, **_end(choice["finish_reason"], stop_string)}


class MessageEvents:
    """See :class:`llorch_worker.openai_api.body.Chunks`.

    ``stops``: whether the request has stop strings; the result alone says which of them was found.
    ``thoughts``: whether to show them.
    """

    def __init__(self, chat: ChatChunks, *, stops: bool, thoughts: bool) -> None:
        self._chat = chat
        self.needs_results = chat.needs_results or stops
        self._thoughts = thoughts
        self._chunk: Mapping[str, Any] = {}
        """The latest of the chat."""
        self._index = -1
        self._open: str | None = None
        """The type of the block that goes on."""
        self._has_content = False
        self._reason: str | None = None
        self._stop_string: str | None = None

    def started(self, job: int, event: Started) -> None:
        self._chat.started(job, event)

    def tokens(self, job: int, event: Tokens) -> Iterator[dict[str, Any]]:
        for chunk in self._chat.tokens(job, event):
            yield from self._events(chunk)

    def finished(
        self, job: int, event: Finished, result: GenerationResult | None
    ) -> Iterator[dict[str, Any]]:
        if result is not None:
            self._stop_string = result.choices[0].stop_string
        for chunk in self._chat.finished(job, event, result):
            yield from self._events(chunk)

    def end(self) -> Iterator[dict[str, Any]]:
        if not self._has_content:
            yield from self._begin(_NO_TEXT)
        yield from self._close()
        end = _end(self._reason, self._stop_string)
        yield {"type": "message_delta", "delta": end, "usage": _usage(self._chunk["usage"])}
        yield {"type": "message_stop"}

    def _events(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if not self._chunk:
            yield {"type": "message_start", "message": _empty_message(chunk)}
        self._chunk = chunk
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        self._reason = choice["finish_reason"] or self._reason
        if (thought := delta.get("reasoning_content")) and self._thoughts:
            if self._open != "thinking":
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta("thinking_delta", thinking=thought)
        if text := delta.get("content"):
            if self._open != "text":
                yield from self._begin(_NO_TEXT)
            yield self._delta("text_delta", text=text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._begin(_tool_use(call["id"], function["name"], {}))
            if arguments := function.get("arguments"):
                yield self._delta("input_json_delta", partial_json=arguments)

    def _begin(self, block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._index += 1
        self._open = block["type"]
        self._has_content = self._has_content or self._open != "thinking"
        yield {"type": "content_block_start", "index": self._index, "content_block": block}
        if self._index == 0:
            yield {"type": "ping"}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=_SIGNATURE)
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _empty_message(document: Mapping[str, Any]) -> Message:
    """``document``: a chat's answer or one of its chunks."""
    return {
        "id": document["id"].replace("chatcmpl-", "msg_", 1),
        "type": "message",
        "role": "assistant",
        "model": document["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(document["usage"]),
    }


def _end(reason: str | None, stop_string: str | None) -> Any:
    if reason == "stop" and stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": _STOP_REASONS[reason or "stop"], "stop_sequence": None}


def _tool_use(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _input(arguments: str) -> dict[str, Any]:
    """A model that nothing holds to it may write what is no JSON."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _usage(usage: UsageDocument) -> MessageUsage:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
