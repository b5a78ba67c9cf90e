"""What HTTP clients expect of every answer: an id, and HEAD where GET is."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def naming_requests(app: ASGIApp) -> ASGIApp:
    """``app``, with an id on each answer: that of the request, if a proxy or a client gave it
    one."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _GIVEN_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (REQUEST_ID.encode(), request_id.encode())
                message = {**message, "headers": [*message["headers"], name]}
            await send(message)

        return await app(scope, receive, naming)

    return named


def answering_head(app: ASGIApp) -> ASGIApp:
    """``app``, which answers HEAD as GET without the body. A stream ends with its header."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await app(scope, receive, send)

        async def head_only(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                # From now on the server reports a disconnect.
                await send({"type": "http.response.body"})

        return await app({**scope, "method": "GET"}, receive, head_only)

    return answered
