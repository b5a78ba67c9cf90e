"""A client that waits for an answer, and may hang up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from llorch_worker.client.cancelling import cancelled
from llorch_worker.gateway.errors import HttpError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of ``work``, which is cancelled if the client hangs up first.

    Raises ``HttpError`` 499 then, which nobody receives.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            logger.info("499: the client of %s hung up", request.url.path)
            raise HttpError(499, "CLIENT_CLOSED_REQUEST", "the client hung up")
        return task.result()
    finally:
        await cancelled(task, gone)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
