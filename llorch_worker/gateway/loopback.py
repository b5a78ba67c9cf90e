"""Names of this machine, and the check that a request was sent to one of them, by no other site."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llorch_worker.gateway.errors import HttpError, error_answer

SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``, a name or an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LoopbackOnly:
    """ASGI middleware that refuses what pages of other sites may let a browser send here.

    A page can let its own name resolve to 127.0.0.1 (DNS rebinding). A browser then takes the
    gateway for a part of that site, but sends the site's name as Host. And any page can send a form
    or an empty POST to any host without asking it first; the browser then sends its Origin.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()) -> None:
        """``origins``: other sites whose pages may call; ``*`` for all."""
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            if not is_loopback(_hostname(f"//{headers.get('host', '')}")):
                message = (
                    "this gateway has no keys, so it answers only to localhost and 127.0.0.1; give "
                    "it keys with LLORCH_GATEWAY_KEYS, or let the proxy before it send such a Host"
                )
                app = error_answer(HttpError(421, "UNKNOWN_HOST", message))
            # A page may open a WebSocket to any host.
            elif scope.get("method") not in SAFE_METHODS and self._is_foreign(headers):
                message = (
                    "this gateway has no keys, so pages of other sites may change nothing; "
                    "LLORCH_GATEWAY_CORS_ORIGINS allows some"
                )
                app = error_answer(HttpError(403, "FOREIGN_ORIGIN", message))
        await app(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        # Only browsers send an Origin: null for a page that hides its own.
        origin = headers.get("origin")
        if origin is None or self._origins & {"*", origin}:
            return False
        # No page can set this. The console behind a proxy has the proxy's name.
        if headers.get("sec-fetch-site") == "same-origin":
            return False
        return not is_loopback(_hostname(origin))


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
