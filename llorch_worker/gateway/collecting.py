"""Garbage collection that does not stop thousands of streams.

A stream that waits has some 300 objects. CPython looks at all that live whenever they have grown by
a quarter, which stops a gateway with 5,000 streams for a second.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

from llorch_worker.client.cancelling import beside

EVERY_S = 1.0
WHOLE_EVERY = 60
"""So many collections lie between two looks at what earlier ones have left out."""
OBJECTS = 500
"""More than what belongs to one open request."""


class Collecting:
    """Collects what is new every second, and leaves out what survives. If that becomes more than
    twice what ``open_requests`` may need, much of it is garbage, and all is collected."""

    def __init__(self, open_requests: Callable[[], int]) -> None:
        self._open_requests = open_requests
        self._own = 0
        """The objects of the gateway itself."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        gc.disable()
        self.collect()
        self._own = gc.get_freeze_count()
        try:
            async with beside(self._collect_again_and_again(), "llorch-collecting"):
                yield
        finally:
            gc.unfreeze()
            gc.enable()

    async def _collect_again_and_again(self) -> None:
        for number in count(1):
            await asyncio.sleep(EVERY_S)
            if number % WHOLE_EVERY == 0:
                self.look_at_all()
            self.collect()

    def look_at_all(self) -> None:
        """Has the next collection take everything, if that is worth it."""
        if gc.get_freeze_count() > 2 * (self._own + OBJECTS * self._open_requests()):
            gc.unfreeze()

    def collect(self) -> None:
        gc.collect()
        gc.freeze()
