"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Request
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from llorch_worker.gateway.hang_up import unless_hung_up

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 60.0
"""A reader that takes nothing for so long is gone."""
DRAIN_S = 3600.0
"""sse-starlette would end a stream without a word when the gateway stops; OpenRequests does it."""


BEGIN_S = 30.0
"""The longest wait for the first event before the answer's header. Clients and proxies give up on
an answer of which nothing comes: nginx after 60 s, agents after 5 minutes."""


class _EventSource(EventSourceResponse):
    """Sends ``body``, which reads ``stream`` after its ``first`` event. The stream is closed in any
    case: a body whose client hangs up before the first event is never begun, and would close
    nothing."""

    def __init__(
        self,
        body: AsyncGenerator[bytes],
        stream: AsyncGenerator[bytes],
        first: asyncio.Future[bytes] | None = None,
    ) -> None:
        super().__init__(body, send_timeout=SEND_TIMEOUT_S, shutdown_grace_period=DRAIN_S)
        self._stream = stream
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._stream):
            try:
                await super().__call__(scope, receive, send)
            finally:
                if self._first is not None:
                    await _given_up(self._first)


def event_source(stream: AsyncGenerator[bytes]) -> EventSourceResponse:
    return _EventSource(stream, stream)


async def begun_event_source(
    request: Request,
    stream: AsyncGenerator[bytes],
    failure: Callable[[Exception], bytes],
    patience_s: float = BEGIN_S,
) -> EventSourceResponse:
    """Waits for the first event: what ``stream`` raises before it is an answer of its own, or after
    ``patience_s`` the event that ``failure`` makes of it."""
    first = asyncio.ensure_future(anext(stream))
    try:
        await unless_hung_up(request, asyncio.wait((first,), timeout=patience_s))
        if first.done():
            first.result()
    except BaseException:
        await _given_up(first)
        raise
    return _EventSource(_all(request.url.path, first, stream, failure), stream, first)


async def _given_up(first: asyncio.Future[bytes]) -> None:
    first.cancel()
    await asyncio.wait((first,))


_BREAKS = str.maketrans({each: f"\\u{ord(each):04x}" for each in "\u0085\u2028\u2029"})


def on_one_line(text: str) -> str:
    """JSON without the characters at which some clients break lines, as Python's ``splitlines``
    does. An event has one line of data."""
    return text.translate(_BREAKS) if not text.isascii() else text


def encoded(document: Mapping[str, Any], event: str | None = None) -> bytes:
    """One event, with its type if it has one."""
    text = on_one_line(json.dumps(document, ensure_ascii=False, separators=(",", ":")))
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {text}\n\n".encode()


async def _all(
    path: str,
    first: asyncio.Future[bytes],
    rest: AsyncGenerator[bytes],
    failure: Callable[[Exception], bytes],
) -> AsyncGenerator[bytes]:
    try:
        try:
            yield await first
        except Exception as error:  # noqa: BLE001 - an answer that has begun has no other way to say
            yield failure(error)
            return
        async for data in rest:
            yield data
    except (asyncio.CancelledError, GeneratorExit):
        logger.info("499: the client of %s hung up", path)
        raise
