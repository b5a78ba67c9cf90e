"""Requests begin a few at a time, so that thousands at once keep nobody else waiting.

Each takes a millisecond or two of the event loop until it waits for Redis. If all that have come
began in one turn of the loop, everything else, probes and tokens of other streams too, would come
after the last of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

MOST_A_TURN: Final = 4
"""Requests that begin in one turn of the event loop."""
AT_ONCE: Final = frozenset({"/health", "/ready", "/metrics"})
"""What orchestrators ask, which begins without waiting."""


class Entrance:
    """Who sent a key, or none, begins in turn with those who sent others."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._begun = 0
        """In this turn."""

    async def enter(self, who: str) -> None:
        """Waits until a request may begin."""
        loop = asyncio.get_running_loop()
        if not (self._begun or self._waiting):
            loop.call_soon(self._next_turn)
        if self._begun < MOST_A_TURN and not self._waiting:
            self._begun += 1
            return
        place = loop.create_future()
        self._waiting.setdefault(who, deque()).append(place)
        await place

    def _next_turn(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < MOST_A_TURN:
            who, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[who] = places
            # That of a request that was cancelled is done.
            if not place.done():
                place.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_turn)


def entering(app: ASGIApp) -> ASGIApp:
    """``app``, whose requests begin as an :class:`Entrance` lets them."""
    entrance = Entrance()

    async def entered(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in AT_ONCE:
            headers = Headers(scope=scope)
            await entrance.enter(headers.get("authorization") or headers.get("x-api-key") or "")
        await app(scope, receive, send)

    return entered
