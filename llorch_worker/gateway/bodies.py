"""Bodies become documents, and results bodies. Large ones do not stop the event loop."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from llorch_worker.contract import (
    Choice,
    EmbeddingResult,
    GenerationResult,
    InvalidRequest,
    TokenLogprobs,
    Tokens,
    describe,
    shown,
)
from llorch_worker.contract.values import UnreadableJson, read_json
from llorch_worker.openai_api.shape import AnyDocument, read_as

SMALL_BYTES = 2**15
"""A body that can hold the event loop up for a few milliseconds at most."""

NUMBER_BYTES = 20
_SCORE_BYTES = 100
"""A token and its log probability, about."""

_CHARSET = re.compile(r'charset="?([^\s;"]+)', re.IGNORECASE)

Result = TypeVar("Result")


class Bodies:
    """Runs what takes time in proportion to a body's bytes: in a thread, if they are many.

    One thread runs at a time: Python's share a lock, and the event loop would wait for each.
    """

    def __init__(self) -> None:
        self._one = CapacityLimiter(1)

    async def run(self, size_bytes: int, do: Callable[[], Result]) -> Result:
        """Returns what ``do`` does with a body of this size, or raises what it raises."""
        if size_bytes <= SMALL_BYTES:
            return do()
        return await to_thread.run_sync(do, limiter=self._one)

    async def run_for(self, request: Request, do: Callable[[], Result]) -> Result:
        """Like :meth:`run`, with the body of ``request``."""
        return await self.run(len(await request.body()), do)

    async def read(self, content: bytes, kind: type[AnyDocument]) -> AnyDocument:
        """Returns the document that ``content`` is. Raises ``InvalidRequest``."""
        return await self.run(len(content), lambda: read_as(kind, document_of(content)))


def about_bytes(what: object, *, ids: bool = False) -> int:
    """A rough size, in bytes of JSON, of a result, a choice or an event ``tokens``; 0 for anything
    else. ``ids``: whether the JSON has the ids of the tokens."""
    match what:
        case EmbeddingResult():
            return len(what.embeddings) * what.dimensions * NUMBER_BYTES
        case GenerationResult():
            choices = sum(about_bytes(choice, ids=ids) for choice in what.choices)
            return _about_bytes_of(what.prompt_logprobs) + choices
        case Choice():
            text = len(what.text) + len(what.reasoning_content or "")
            numbers = len(what.token_ids) * NUMBER_BYTES if ids else 0
            return text + numbers + _about_bytes_of(what.logprobs)
        case Tokens():
            text = len(what.text) + len(what.reasoning_content or "")
            return text + _about_bytes_of(what.logprobs)
    return 0


def _about_bytes_of(scored: Sequence[TokenLogprobs | None] | None) -> int:
    # All have as many alternatives; the first of a prompt is None.
    last = scored[-1] if scored else None
    return scores_bytes(len(scored or ()), len(last.top if last else ()))


def scores_bytes(tokens: int, alternatives: int) -> int:
    """A rough size, in bytes of JSON, of the log probabilities of ``tokens``, each with as many
    ``alternatives``."""
    return tokens * _SCORE_BYTES * (1 + alternatives)


class LongJson(JSONResponse):
    """An answer as JSON, encoded like :func:`in_pieces`."""

    def render(self, content: Any) -> bytes:
        return in_pieces(content, _LEVELS).encode()


_LEVELS = 5
"""From an answer down to a token with its log probabilities."""
compact = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def in_pieces(value: Any, levels: int) -> str:
    """JSON that is encoded piece by piece: meanwhile Python's other threads get their turns."""
    return "".join(_pieces(value, levels))


def _pieces(value: Any, levels: int) -> Iterator[str]:
    if not levels or not value or not isinstance(value, dict | list):
        yield compact(value)
    elif isinstance(value, dict):
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else '{'}{compact(name)}:"
            yield from _pieces(each, levels - 1)
        yield "}"
    elif not isinstance(value[-1], dict | list):
        yield compact(value)
    else:
        for number, each in enumerate(value):
            yield "," if number else "["
            yield from _pieces(each, levels - 1)
        yield "]"


def document_of(content: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises ``InvalidRequest``."""
    try:
        document = read_json(content)
    except UnreadableJson as error:
        raise InvalidRequest.from_fault("body", str(error), f"{len(content)} bytes") from None
    if not isinstance(document, dict):
        raise InvalidRequest.from_fault("body", "must be a JSON object", describe(document))
    return document


class BodyRefused(HTTPException):
    """A body that breaks rules: FastAPI lets no other exception pass while it reads."""

    def __init__(self, reason: InvalidRequest) -> None:
        super().__init__(400)
        self.reason = reason


class _Request(Request):
    kind: type[BaseModel]

    async def json(self) -> BaseModel:
        """The document, which FastAPI would make of JSON by itself, on the event loop."""
        bodies: Bodies = self.app.state.gateway.bodies
        content = await self.body()
        charset = _CHARSET.search(self.headers.get("content-type", ""))
        try:
            if charset and charset[1].lower() not in ("utf-8", "utf8") and not content.isascii():
                got = f"charset {shown(charset[1])}"
                raise InvalidRequest.from_fault("body", "must be JSON in UTF-8", got)
            return await bodies.read(content, self.kind)
        except InvalidRequest as error:
            raise BodyRefused(error) from None


class BodyRoute(APIRoute):
    """A route that reads its body as :class:`Bodies` do."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind: Any = self.body_field.field_info.annotation

        async def reading(request: Request) -> Response:
            own = _Request(request.scope, request.receive)
            own.kind = kind
            return await handle(own)

        return reading


class Router(APIRouter):
    """A router of :class:`BodyRoute`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, route_class=BodyRoute)
