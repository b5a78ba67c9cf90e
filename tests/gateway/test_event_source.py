"""A stream of events is closed whenever its client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from fastapi import Request
from starlette.types import Message, Scope

from llorch_worker.gateway.event_source import begun_event_source

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}


def test_a_client_that_hangs_up_before_the_first_event_closes_the_stream() -> None:
    closed: list[bool] = []

    async def stream() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def stay() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def hang_up() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        # The head of the answer does not go out any more.
        await asyncio.Event().wait()

    async def answered() -> list[bool]:
        events = stream()
        response = await begun_event_source(Request(SCOPE, stay), events)
        await response(SCOPE, hang_up, send)
        return list(closed)

    assert asyncio.run(answered()) == [True]
