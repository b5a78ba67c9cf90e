"""Names of this machine, and the check that a request was sent to one of them."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llorch_worker.gateway.errors import plain_answer


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``, a name or an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LoopbackOnly:
    """ASGI middleware that refuses requests whose header Host is not a loopback name.

    A page of another site can let its own name resolve to 127.0.0.1 (DNS rebinding). A browser then
    takes the gateway for a part of that site, but sends the site's name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_loopback(_host(scope)):
            message = (
                "this gateway has no keys, so it answers only to localhost and 127.0.0.1; give it "
                "keys with LLORCH_GATEWAY_KEYS, or let the proxy before it send such a Host"
            )
            await plain_answer(421, "UNKNOWN_HOST", message)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _host(scope: Scope) -> str:
    try:
        return urlsplit(f"//{Headers(scope=scope).get('host', '')}").hostname or ""
    except ValueError:
        return ""
