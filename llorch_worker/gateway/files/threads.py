"""Threads for the bytes of files. With the event loop's own, the files of one caller would take
those by which jobs are submitted and cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 2
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="llorch-files")


async def in_thread(do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """As :func:`asyncio.to_thread`."""
    call = partial(copy_context().run, do, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)
