"""Who may be at the server: anybody, or a suspect alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llorch_worker.servers.answer import ServerGeneration


class Isolation:
    """A suspect waits until nobody else is there, and others wait until it is cleared: by its first
    token, or by its end if a death would void its tokens."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._suspects_waiting = 0
        self._alone: ServerGeneration | None = None
        self.there: set[ServerGeneration] = set()

    @asynccontextmanager
    async def enter(self, generation: ServerGeneration) -> AsyncIterator[None]:
        async with self._changed:
            if generation.suspect:
                self._suspects_waiting += 1
                try:
                    await self._changed.wait_for(lambda: not self.there)
                finally:
                    self._suspects_waiting -= 1
                    self._changed.notify_all()
                self._alone = generation
            else:
                await self._changed.wait_for(lambda: not (self._suspects_waiting or self._alone))
            self.there.add(generation)
        try:
            yield
        finally:
            self.there.discard(generation)
            self.clear(generation)
            if self._suspects_waiting and not self.there:
                self._tell()

    def clear(self, generation: ServerGeneration) -> None:
        """Others may come."""
        if self._alone is generation:
            self._alone = None
            self._tell()

    def _tell(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._told = asyncio.ensure_future(notify())
