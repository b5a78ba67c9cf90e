"""A gateway closes after its last request has cleaned up."""

from __future__ import annotations

import asyncio

import httpx
from starlette.types import Receive, Scope, Send

from llorch_worker.gateway.open_requests import OpenRequests


def test_requests_that_are_cancelled_clean_up_first() -> None:
    async def cut_off() -> bool:
        begun, cleaned = asyncio.Event(), asyncio.Event()

        async def answer_never(scope: Scope, receive: Receive, send: Send) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                cleaned.set()

        requests = OpenRequests()
        transport = httpx.ASGITransport(requests.middleware(answer_never))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            asking = asyncio.create_task(http.get("/"))
            await begun.wait()
            asking.cancel()
            await requests.ended()
        return cleaned.is_set()

    assert asyncio.run(cut_off())
