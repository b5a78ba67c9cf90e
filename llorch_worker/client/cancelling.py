"""Ends tasks for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancels ``tasks`` and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """The block, while a task of this name does ``work``; both end with the block."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        await cancelled(task)
