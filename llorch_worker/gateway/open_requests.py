"""The requests that a gateway has not yet answered, also when it stops."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_worker.gateway.errors import error_answer
from llorch_worker.gateway.event_source import encoded
from llorch_worker.openai_api.errors import GatewayStopping, body_of

CLEAN_UP_S = 10.0


class OpenRequests:
    """Lets a gateway close after its last request.

    uvicorn cancels the requests that outlast its patience, and does not wait for them. They still
    need Redis to cancel their jobs, and their clients wait for an answer.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def count(self) -> int:
        return len(self._tasks)

    async def ended(self) -> None:
        """Waits for the requests to end, but not for ever."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLEAN_UP_S)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            begun: Message | None = None

            async def noting(message: Message) -> None:
                nonlocal begun
                if message["type"] == "http.response.start":
                    begun = message
                await send(message)

            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await app(scope, receive, noting)
            except asyncio.CancelledError:
                # Of a client that hangs up, only what waits within is cancelled.
                stopping = GatewayStopping("the gateway is stopping; send the request again")
                if begun is None:
                    return await error_answer(stopping)(scope, receive, send)
                kind = Headers(raw=begun["headers"]).get("content-type", "")
                if not kind.startswith("text/event-stream"):
                    raise
                event = encoded(body_of(stopping).model_dump(mode="json"), "error")
                await send({"type": "http.response.body", "body": event, "more_body": False})
            finally:
                self._tasks.discard(task)

        return counted
