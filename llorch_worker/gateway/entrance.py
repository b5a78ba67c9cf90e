"""Requests begin a few at a time, so that thousands at once keep nobody else waiting.

Each takes a millisecond or two of the event loop until it waits for Redis. If all that have come
began in one iteration of the loop, everything else, probes and tokens of other streams too, would
come after the last of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llorch_worker.gateway.errors import RateLimited, error_answer

MOST_AN_ITERATION: Final = 4
"""Requests that begin in one iteration of the event loop."""
MOST_WAITING: Final = 8_192
"""Requests of one key, or of all without a known one, that wait to begin."""
AT_ONCE: Final = frozenset({"/health", "/ready", "/metrics"})
"""What orchestrators ask, which begins without waiting."""


class Entrance:
    """Keys alternate, one request each; all without one count as one key."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._begun = 0
        """In this iteration."""

    async def enter(self, find: Callable[[], str]) -> None:
        """Waits until a request may begin. ``find`` tells whose it is, where that counts. Raises
        ``RateLimited`` if too many of theirs wait."""
        loop = asyncio.get_running_loop()
        if not (self._begun or self._waiting):
            loop.call_soon(self._next_iteration)
        if self._begun < MOST_AN_ITERATION and not self._waiting:
            self._begun += 1
            return
        who = find()
        if len(self._waiting.get(who, ())) >= MOST_WAITING:
            raise RateLimited(f"{MOST_WAITING} requests of this key wait to begin; send it later")
        place = loop.create_future()
        self._waiting.setdefault(who, deque()).append(place)
        await place

    def _next_iteration(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < MOST_AN_ITERATION:
            who, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[who] = places
            # That of a request that was cancelled is done.
            if not place.done():
                place.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_iteration)


def entering(app: ASGIApp, name_of: Callable[[Mapping[str, str]], str]) -> ASGIApp:
    """``app``, whose requests begin as an :class:`Entrance` lets them. ``name_of`` gets a request's
    headers and tells whose key it has; "" if it has none that is known."""
    entrance = Entrance()

    async def entered(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in AT_ONCE:
            try:
                await entrance.enter(lambda: name_of(Headers(scope=scope)))
            except RateLimited as error:
                await error_answer(error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return entered
