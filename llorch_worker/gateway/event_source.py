"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
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


class _EventSource(EventSourceResponse):
    """Sends ``body``, which reads ``stream``. The stream is closed in any case: a body whose client
    hangs up before the first event is never begun, and would close nothing."""

    def __init__(self, body: AsyncGenerator[bytes], stream: AsyncGenerator[bytes]) -> None:
        super().__init__(body, send_timeout=SEND_TIMEOUT_S, shutdown_grace_period=DRAIN_S)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._stream):
            await super().__call__(scope, receive, send)


def event_source(stream: AsyncGenerator[bytes]) -> EventSourceResponse:
    return _EventSource(stream, stream)


async def begun_event_source(
    request: Request, stream: AsyncGenerator[bytes]
) -> EventSourceResponse:
    """Waits for the first event: what ``stream`` raises before it is an answer of its own."""
    first = await unless_hung_up(request, _next(stream))
    return _EventSource(_all(request.url.path, first, stream), stream)


def encoded(document: Mapping[str, Any], event: str | None = None) -> bytes:
    """One event, with its type if it has one."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {text}\n\n".encode()


async def _next(stream: AsyncGenerator[bytes]) -> bytes:
    return await anext(stream)


async def _all(path: str, first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    try:
        yield first
        async for data in rest:
            yield data
    except (asyncio.CancelledError, GeneratorExit):
        logger.info("499: the client of %s hung up", path)
        raise
