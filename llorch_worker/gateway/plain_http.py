"""What HTTP clients expect of every answer: an id, HEAD where GET is, and one of each spelling of
a path."""

from __future__ import annotations

import re
import uuid
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
_URL = re.compile(rb"https?://(?P<authority>[^/]*)(?P<path>.*)", re.IGNORECASE | re.DOTALL)
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


def one_spelling(app: ASGIApp) -> ASGIApp:
    """Strips trailing slashes and the authority of an absolute URL from the path that ``app`` gets.

    A redirect would lose the body of a POST with many clients, and its absolute URL the proxy.
    """

    async def spelt(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            scope = _without_authority(scope)
            if len(scope["path"]) > 1:
                scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await app(scope, receive, send)

    return spelt


def _without_authority(scope: Scope) -> Scope:
    """``scope`` of a request whose target is a whole URL, as if it named the path alone."""
    url = _URL.match(scope.get("raw_path") or b"")
    if url is None:
        return scope
    # It goes before the header: RFC 9112, 3.2.2.
    host = url["authority"].rpartition(b"@")[2]
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    path = url["path"] or b"/"
    return {
        **scope,
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "headers": [(b"host", host), *headers],
    }


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
