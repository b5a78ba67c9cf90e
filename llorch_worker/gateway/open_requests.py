"""The requests that a gateway has not yet answered."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

CLEAN_UP_S = 10.0


class OpenRequests:
    """Lets a gateway close after its last request.

    uvicorn cancels the requests that outlast its patience, and does not wait for them. They still
    need Redis to cancel their jobs.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ended(self) -> None:
        """Waits for the requests to end, but not for ever."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLEAN_UP_S)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await app(scope, receive, send)
            finally:
                self._tasks.discard(task)

        return counted
