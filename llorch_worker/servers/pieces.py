"""What the events of a server's answer say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from llorch_worker.contract import Usage
from llorch_worker.engine.told import CallTold, TokenScore

MOST_COUNTED: Final = 2**31
"""Tokens."""
ENDS: Final = ("stop", "length", "tool_calls", "content_filter")
"""Why an answer has ended."""
NOT_ENDED: Final = (None, "", "null")
"""What stands for no reason, as SGLang and Ollama have put it."""
GIVEN_UP: Final = ("abort", "error")
"""The same where it has not: vLLM and SGLang say so of all that run when they are stopped."""


class _Part(msgspec.Struct, gc=False):
    pass


class _Function(_Part):
    name: str | None = None
    arguments: str | None = None


class _Call(_Part):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(_Part):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(_Part):
    index: int | None = None
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    token_ids: list[int] | None = None


class _Details(_Part):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(_Part):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Logprob(_Part):
    id: int
    token: str
    logprob: float | None
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]] | None = None
    top_logprobs: list[_Logprob] | None = None


class _Event(_Part):
    """Of OpenAI's API, or of llama-server's own."""

    choices: list[_Choice | None] | None = None
    usage: _Usage | None = None
    error: Any = None
    content: str | None = None
    tokens: list[int] | None = None
    stop: bool = False
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    stop_type: str = ""
    stopping_word: str = ""
    cached: int | None = msgspec.field(name="timings/cache_n", default=None)
    completion_probabilities: list[_Logprob] | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Piece:
    """What is new of one choice."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallTold, ...] = ()
    """With the server's indexes, of which several calls may have one."""
    ids: tuple[int, ...] | None = None
    """None: the server tells none."""
    generated: int | None = None
    """How many tokens the server has made by now."""
    scores: Sequence[TokenScore] = ()
    finish: str | None = None
    stop_string: str | None = None
    counted: Usage | None = None
    """By the server, at the end."""
    error: Any = None

    @property
    def tokens(self) -> int:
        """How many it has, or has at least."""
        return max(len(self.ids or ()), bool(self.text or self.thought or self.calls))


def read_piece(data: bytes) -> Piece:
    """Raises ``msgspec.MsgspecError`` if ``data`` is no event."""
    event = _decode(data)
    if event.error:
        return Piece(error=event.error)
    if event.content is not None or event.stop:
        return _of_llama(event)
    piece = Piece(counted=None if event.usage is None else _usage_of(event.usage))
    for choice in event.choices or ():
        if choice is None or choice.index:
            continue  # one was asked for
        delta = choice.delta
        if delta is not None:
            piece.text = delta.content or ""
            piece.thought = delta.reasoning_content or delta.reasoning or ""
            piece.calls = tuple(_call(each) for each in delta.tool_calls or ())
        else:
            piece.text = choice.text or ""
        piece.ids = None if choice.token_ids is None else tuple(choice.token_ids)
        if choice.finish_reason not in NOT_ENDED:
            piece.finish = choice.finish_reason
            stop = choice.stop_reason if choice.matched_stop is None else choice.matched_stop
            piece.stop_string = stop if isinstance(stop, str) else None
    return piece


def _of_llama(event: _Event) -> Piece:
    probabilities = event.completion_probabilities or ()
    piece = Piece(
        text=event.content or "",
        ids=tuple(event.tokens or ()),
        generated=event.tokens_predicted,
        scores=[_score(each) for each in probabilities],
    )
    if event.stop:
        piece.finish = {"limit": "length", "eos": "stop", "word": "stop"}.get(event.stop_type, "")
        piece.stop_string = event.stopping_word or None
        piece.counted = Usage(
            prompt=_count(event.tokens_evaluated),
            cached=_count(event.cached),
            completion=_count(event.tokens_predicted),
        )
    return piece


def _call(part: _Call) -> CallTold:
    function = part.function or _Function()
    return CallTold(part.index or 0, part.id, function.name, function.arguments or "")


def _usage_of(told: _Usage) -> Usage:
    prompt = told.prompt_tokens_details or _Details()
    completion = told.completion_tokens_details or _Details()
    return Usage(
        prompt=_count(told.prompt_tokens),
        cached=_count(prompt.cached_tokens),
        completion=_count(told.completion_tokens),
        reasoning=_count(completion.reasoning_tokens),
    )


def _count(tokens: int | None) -> int:
    """As it can be added up for a tenant: one count that cannot be right would spoil them all."""
    return min(max(tokens or 0, 0), MOST_COUNTED)


def _score(entry: _Logprob) -> TokenScore:
    own = None if entry.bytes is None else tuple(entry.bytes)
    same = own is not None and bytes(own) == entry.token.encode()
    logprob = -1e4 if entry.logprob is None else entry.logprob
    top = tuple([_score(each) for each in entry.top_logprobs or ()])
    return TokenScore(entry.id, entry.token, logprob, None if same else own, top)
