"""Ends tasks for good."""

from __future__ import annotations

import asyncio
from typing import Any

CANCEL_AGAIN_S = 3.0
"""Longer than a task needs to hand back what it holds."""


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancels ``tasks`` and waits until they have ended.

    Repeatedly, because a cancellation may get lost while redis-py connects.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
