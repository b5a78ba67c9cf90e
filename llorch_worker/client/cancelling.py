"""Ends tasks for good."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancelled(*tasks: asyncio.Task[Any], again_s: float = 3.0) -> None:
    """Cancels ``tasks`` and waits until they have ended.

    Repeatedly, because a cancellation may get lost while redis-py connects. ``again_s``: longer
    than a task needs to clean up.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=again_s)
    await asyncio.gather(*tasks, return_exceptions=True)
