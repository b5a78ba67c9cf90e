"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from llorch_worker.client.cancelling import cancelled
from llorch_worker.gateway.connections import CONNECTION, Connection
from llorch_worker.gateway.hang_up import unless_hung_up

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 60.0
"""A reader that takes nothing for so long is gone."""
BEGIN_S = 30.0
"""The longest wait for the first event before the answer's header. Clients and proxies give up on
an answer of which nothing comes: nginx after 60 s, agents after 5 minutes."""


class EventSource(Response):
    """Sends ``body``, and comments in between, until the client hangs up.

    It has one task besides the request's own, because thousands may wait at a time. ``body`` is
    closed in any case, and so is ``stream``, which it reads after its ``first`` event: a body whose
    client hangs up before the first event is never begun, and would close nothing.
    ``ends_at_stop``: it ends at once, and not with its body, when the gateway stops.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes],
        stream: AsyncGenerator[bytes] | None = None,
        first: asyncio.Future[bytes] | None = None,
        *,
        ends_at_stop: bool = False,
    ) -> None:
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._body = body
        self._stream = stream
        self._first = first
        self._ends_at_stop = ends_at_stop
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            if self._stream is not None:
                await stack.enter_async_context(aclosing(self._stream))
            if self._first is not None:
                stack.push_async_callback(_given_up, self._first)
            await stack.enter_async_context(aclosing(self._body))
            await self._until_gone(scope, receive, send)
        if not self._gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_gone(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        asked, over = task.cancelling(), False

        def end() -> None:
            nonlocal over
            if not over:
                over = True
                task.cancel()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._gone = True
            end()

        # Only our own server has one.
        connection: Connection | None = scope.get("state", {}).get(CONNECTION)
        if connection is not None and self._ends_at_stop:
            connection.at_stop = end
        watching = asyncio.create_task(watch())
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            if connection is not None:
                connection.begin_comments()
            async for data in self._body:
                message = {"type": "http.response.body", "body": data, "more_body": True}
                try:
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await send(message)
                except TimeoutError:
                    self._gone = True
                    return
        except asyncio.CancelledError:
            if not over or task.uncancel() > asked:
                raise
        finally:
            over = True
            if connection is not None:
                connection.end_comments()
                connection.at_stop = None
            await cancelled(watching)


async def begun_event_source(
    request: Request,
    stream: AsyncGenerator[bytes],
    failure: Callable[[Exception], bytes],
    patience_s: float = BEGIN_S,
) -> EventSource:
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
    return EventSource(_all(request.url.path, first, stream, failure), stream, first)


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
    return framed(json.dumps(document, ensure_ascii=False, separators=(",", ":")), event)


def framed(text: str, event: str | None) -> bytes:
    """Like :func:`encoded`, of a document's JSON."""
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {on_one_line(text)}\n\n".encode()


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
