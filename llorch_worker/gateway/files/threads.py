"""Threads for the bytes of files. With the event loop's own, the files of one caller would take
those by which jobs are submitted and cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 2
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="llorch-files")


async def in_thread(do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What ``do`` returns, which may block."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, lambda: do(*args, **kwargs))
