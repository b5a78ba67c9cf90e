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
        self._changed = asyncio.Event()
        self._suspects_waiting = 0
        self._alone: ServerGeneration | None = None
        self.there: set[ServerGeneration] = set()

    @asynccontextmanager
    async def enter(self, generation: ServerGeneration) -> AsyncIterator[None]:
        if generation.suspect:
            self._suspects_waiting += 1
            try:
                while self.there:
                    await self._changed.wait()
            finally:
                self._suspects_waiting -= 1
                self._tell()
            self._alone = generation
        else:
            while self._suspects_waiting or self._alone:
                await self._changed.wait()
        self.there.add(generation)
        try:
            yield
        finally:
            self.there.discard(generation)
            self.clear(generation)
            self._tell()

    def clear(self, generation: ServerGeneration) -> None:
        """Others may come."""
        if self._alone is generation:
            self._alone = None
            self._tell()

    def _tell(self) -> None:
        """Those that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()
