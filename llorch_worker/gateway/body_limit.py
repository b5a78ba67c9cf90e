"""Refuses bodies that are too large or compressed, come from unknown callers, or do not arrive,
before they are read whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_worker.gateway.errors import HttpError, error_answer

_CLOSE = {"Connection": "close"}
"""What the client still sends is not read."""
_PLAIN = ("", "identity")
SLOWEST_BYTES_S = 16 * 2**10
"""A body that comes more slowly, on average, may take no longer than ``timeout_s``."""


class BodyLimit:
    """ASGI middleware. ``limit_of(path)`` is the most bytes of a body sent to that path.

    ``admit`` gets the headers of who sends a body, and raises ``HttpError``: FastAPI looks at them
    only after the body.
    """

    def __init__(
        self,
        app: ASGIApp,
        admit: Callable[[Headers], object],
        limit_of: Callable[[str], int],
        timeout_s: float,
    ) -> None:
        self._app = app
        self._admit = admit
        self._limit_of = limit_of
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            # A proxy in front may take the other for the body's end, and the rest for a request.
            both = "send Content-Length or Transfer-Encoding, not both"
            answer = error_answer(HttpError(400, "INVALID_REQUEST", both), _CLOSE)
            return await answer(scope, receive, send)
        if Headers(scope=scope).get("content-encoding", "").strip().lower() not in _PLAIN:
            plain = "send the body as it is, without Content-Encoding: none is decoded here"
            answer = error_answer(HttpError(415, "UNSUPPORTED_MEDIA_TYPE", plain), _CLOSE)
            return await answer(scope, receive, send)
        limit = self._limit_of(scope["path"])
        too_large = f"the body must be at most {limit} bytes"
        if _declared(scope) > limit:
            answer = error_answer(HttpError(413, "TOO_LARGE", too_large), _CLOSE)
            return await answer(scope, receive, send)
        read, whole = 0, False
        began_s = time.monotonic()

        async def limited() -> Message:
            nonlocal read, whole
            if whole:
                # Waits for the client to hang up, however long that takes.
                return await receive()
            try:
                self._admit(Headers(scope=scope))
            except HttpError as error:
                raise HTTPException(error.status, error.message, _CLOSE) from None
            late_s = self._timeout_s + read / SLOWEST_BYTES_S - (time.monotonic() - began_s)
            try:
                async with asyncio.timeout(min(self._timeout_s, late_s)):
                    message = await receive()
            except TimeoutError:
                late = f"the body stopped for {self._timeout_s:g} s, or came too slowly"
                raise HTTPException(408, late, _CLOSE) from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > limit:
                raise HTTPException(413, too_large, _CLOSE)
            return message

        return await self._app(scope, limited, send)


def _declared(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
