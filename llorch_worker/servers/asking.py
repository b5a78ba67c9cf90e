"""Asks a server for an answer, and reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from llorch_worker.contract import (
    ContextLengthExceeded,
    Fault,
    GenerationRequest,
    InvalidRequest,
    Journal,
    LlorchError,
    describe,
)
from llorch_worker.contract.seeds import choice_seed
from llorch_worker.servers.answer import ChoiceSoFar, ServerGeneration
from llorch_worker.servers.bodies import Served, body_of, is_native, template_body, texts_of
from llorch_worker.servers.connection import (
    BUSY,
    UNREACHED,
    AnswerCut,
    Connection,
    Refusal,
    WrongAnswer,
)
from llorch_worker.servers.pieces import ENDS, GIVEN_UP, Piece, read_piece

T = TypeVar("T")

BYTES_A_TOKEN: Final = 8_192
"""The most that an answer may have for each token, with log probabilities."""
MOST_TOKENS: Final = 2**17
"""Of an answer, where neither the request nor the server names a number."""
MOST_ADDED: Final = 1024
"""Tokens that a chat template or a tokenizer adds to a prompt, by a cautious guess."""
_WRITTEN: Final = {"prompt", "messages", "tools"}
_SHORTEN: Final = ("vLLM", "llama-server")
"""Servers that end an answer where the context does, and do not say that it is shorter than asked
for. The others refuse such a request."""


@dataclass(frozen=True)
class Asking:
    """Raises ServerAway, AnswerCut, Refusal and WrongAnswer, as a :class:`.Connection` does."""

    connection: Connection
    served: Served
    silent_s: float
    """See :meth:`.Connection.stream`."""

    async def can_continue(self, request: GenerationRequest, journal: Journal) -> bool:
        """Whether a prompt with the journal's ids goes on as the answer would have."""
        begun = journal.choices.get(0)
        if begun is None or not begun.token_ids or begun.thought or begun.calls:
            return False
        if request.n > 1 or request.logprobs is not None:
            return False
        if request.shapes_text or request.may_call:
            return False
        if request.presence_penalty or request.frequency_penalty:
            return False  # they count the tokens of the answer alone
        body = {"model": self.served.model, "tokens": begun.token_ids}
        answer = await self.connection.ask("/detokenize", body)
        name = {"llama-server": "content", "vLLM": "prompt"}.get(self.served.kind, "text")
        return _member(answer, name, str).strip() == begun.text.strip()

    async def prompt_of(
        self, request: GenerationRequest, begun: Sequence[int]
    ) -> Sequence[int] | str | None:
        """What the server gets in place of the request's prompt, if anything. ``begun``: the ids
        that an answer has already. Raises ContextLengthExceeded."""
        prompt: Sequence[int] | str | None = None
        native = is_native(request, self.served)
        if begun or (native and request.messages is None):
            prompt = [*await self._prompt_ids(request), *begun]
        elif native:
            prompt = await self._rendered(request)
        await self._check_fit(request, prompt, begun)
        return prompt

    async def _check_fit(
        self,
        request: GenerationRequest,
        prompt: Sequence[int] | str | None,
        begun: Sequence[int],
    ) -> None:
        limit, new = self.served.max_context, request.least_tokens
        if request.cut_max_tokens or self.served.kind not in _SHORTEN or not limit:
            return
        if prompt is None or isinstance(prompt, str):
            # No token has less than a byte. Most requests are known to fit without a question.
            size = len(request.model_dump_json(include=_WRITTEN).encode())
            if request.prompt_token_ids is None and size + MOST_ADDED + new <= limit:
                return
            try:
                tokens = len(await self._prompt_ids(request))
            except (Refusal, WrongAnswer) as answer:
                if isinstance(answer, Refusal) and answer.status in (*BUSY, *UNREACHED):
                    raise
                return  # it counts none
        else:
            tokens = len(prompt) - len(begun)
        if tokens + new > limit:
            raise _beyond(limit, f"{tokens} + {new} tokens")

    async def read(
        self, generation: ServerGeneration, choice: ChoiceSoFar, prompt: Sequence[int] | str | None
    ) -> AsyncIterator[Piece]:
        """The pieces of one choice."""
        request, begun = generation.request, len(choice.begun.token_ids)
        most, holds = request.most_tokens, self.served.max_context
        if request.cut_max_tokens and self.served.kind == "vLLM" and holds:
            # Of no more than it holds, vLLM leaves what does not fit beside the prompt.
            most = min(most or holds, holds)
        left = None if most is None else most - begun
        if begun and left is not None and left <= 0:
            yield Piece(finish="length")
            return
        try:
            async for piece in self._read(generation, choice, prompt, left):
                yield piece
        except Refusal as refusal:
            if not (request.cut_max_tokens and refusal.is_for_context and left is not None):
                raise
            # As many as the context holds beside the prompt, which only the server has counted.
            async for piece in self._read(generation, choice, prompt, None):
                yield piece

    async def _read(
        self,
        generation: ServerGeneration,
        choice: ChoiceSoFar,
        prompt: Sequence[int] | str | None,
        left: int | None,
    ) -> AsyncIterator[Piece]:
        request = generation.request
        is_text = request.messages is None or prompt is not None
        if left is None and is_text and self.served.kind == "SGLang":
            ids = prompt or await self._prompt_ids(request)
            left = max(1, self.served.max_context - len(ids))
        if left is None and is_text and self.served.kind == "another server":
            rule = "must be given, and fit: the server does not say what its context holds"
            raise InvalidRequest.from_fault("max_tokens", rule, describe(request.max_tokens))
        seed = choice_seed(generation.seed, choice.index)
        begun = len(choice.begun.token_ids)
        path, body = body_of(
            request, self.served, seed=seed, prompt=prompt, most_tokens=left, begun=begun
        )
        most = left or self.served.max_context or request.most_tokens or MOST_TOKENS
        most_bytes = 2**16 + BYTES_A_TOKEN * most
        tokens = 0
        stream = self.connection.stream(path, body, most_bytes=most_bytes, silent_s=self.silent_s)
        try:
            async with aclosing(stream):
                async for data in stream:
                    piece = _piece_of(data)
                    tokens += piece.tokens
                    if tokens > most:
                        raise WrongAnswer(f"the server sent more than the {most} tokens asked for")
                    yield piece
                    if path == "/completion" and piece.finish is not None:
                        return
            if choice.finish is None:
                raise AnswerCut("the server ended the answer before its end")
        except AnswerCut:
            # After the end of the text, its count is all that may still come.
            if choice.finish is None:
                raise

    async def _rendered(self, request: GenerationRequest) -> str:
        answer = await self.connection.ask("/apply-template", template_body(request))
        return _member(answer, "prompt", str)

    async def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        """The ids of the prompt, as the server makes them."""
        if request.prompt_token_ids is not None:
            return list(request.prompt_token_ids)
        body: dict[str, Any] = {"model": self.served.model}
        if request.messages is None:
            text, special = request.prompt, request.add_special_tokens
            body |= {"prompt": text, "add_special_tokens": special}
            body |= {"content": text, "add_special": special}
            body["parse_special"] = bool(request.parse_special)
        elif self.served.kind == "llama-server":
            body |= {"content": await self._rendered(request), "add_special": True}
        else:
            body |= template_body(request)
        ids = _member(await self.connection.ask("/tokenize", body), "tokens", list)
        if not all(isinstance(each, int) for each in ids):
            raise WrongAnswer("the server's answer at /tokenize has no list of ids")
        return ids

    def error_of(self, request: GenerationRequest, refusal: Refusal) -> LlorchError:
        """What the server says against the request itself."""
        said = refusal.shown(texts_of(request))
        if refusal.is_for_context:
            return _beyond(self.served.max_context, said)
        if refusal.status in (400, 404, 413, 422) or refusal.type == "invalid_request_error":
            return InvalidRequest.from_fault("request", "must suit the server", said)
        return WrongAnswer(f"the server failed: {said}")


def _piece_of(data: bytes) -> Piece:
    try:
        piece = read_piece(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):  # the last of bytes that are none
        raise WrongAnswer(f"the server sent {len(data)} bytes that are no event") from None
    if piece.error is not None:
        raise Refusal(0, piece.error)
    if piece.finish in GIVEN_UP:
        raise AnswerCut("the server gave the answer up")
    if piece.finish is not None and piece.finish not in ENDS:
        raise WrongAnswer("the server ended the answer for a reason that is not known here")
    return piece


def _beyond(limit: int, got: str) -> ContextLengthExceeded:
    rule = f"must fit into the context of {limit or 'the'} tokens"
    fault = Fault(field="prompt + max_tokens", rule=rule, got=got)
    return ContextLengthExceeded(str(fault), faults=[fault])


def _member(document: object, name: str, kind: type[T]) -> T:
    value = document.get(name) if isinstance(document, dict) else None
    if not isinstance(value, kind):
        raise WrongAnswer(f"the server's answer has no {name}")
    return value
