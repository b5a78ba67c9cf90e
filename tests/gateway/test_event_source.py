"""A stream of events is closed whenever its client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest
from fastapi import Request
from starlette.types import Message, Scope

from llorch_worker.client.stream import Position
from llorch_worker.contract import Tokens
from llorch_worker.gateway.errors import HttpError
from llorch_worker.gateway.event_source import begun_event_source, encoded
from llorch_worker.gateway.routes.jobs import sent_event

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}


def failure(error: Exception) -> bytes:
    return f"event: error\ndata: {error}\n\n".encode()


def test_no_text_breaks_the_line_of_an_event() -> None:
    """Also for clients that know more ends of lines than events have, as ``splitlines`` does."""
    text = "a\u0085b\u2028c\u2029d\r\n\v\f\x1c\x1d\x1ee"
    of_job = sent_event(Tokens(index=0, text=text, ids=(1,)), Position()).encode()
    for event in (encoded({"text": text}), of_job):
        lines = event.decode().splitlines()
        data = [line for line in lines if line.startswith("data: ")]
        assert [json.loads(line.removeprefix("data: "))["text"] for line in data] == [text]
        assert len(lines) == event.count(b"\n")


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_begins_though_its_first_event_is_not_there_yet(fails: bool) -> None:
    sent: list[Message] = []

    async def answered() -> None:
        begun = asyncio.Event()

        async def stream() -> AsyncGenerator[bytes]:
            await begun.wait()
            if fails:
                raise ValueError("no luck")
            yield b"data: x\n\n"

        async def stay() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)
            begun.set()

        response = await begun_event_source(Request(SCOPE, stay), stream(), failure, 0.01)
        await response(SCOPE, stay, send)

    asyncio.run(answered())
    assert (sent[0]["type"], sent[0]["status"]) == ("http.response.start", 200)
    assert sent[1]["body"] == (failure(ValueError("no luck")) if fails else b"data: x\n\n")


@pytest.mark.parametrize("patience_s", [30, 0.01])
def test_a_client_that_goes_before_the_first_event_closes_the_stream_too(
    patience_s: float,
) -> None:
    closed: list[bool] = []

    async def stream() -> AsyncGenerator[bytes]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            closed.append(True)

    async def answered() -> None:
        late = asyncio.Event()

        async def receive() -> Message:
            if patience_s < 1:
                await late.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            late.set()

        with suppress(HttpError):
            response = await begun_event_source(
                Request(SCOPE, receive), stream(), failure, patience_s
            )
            await response(SCOPE, receive, send)

    asyncio.run(answered())
    assert closed == [True]


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
        response = await begun_event_source(Request(SCOPE, stay), events, failure)
        await response(SCOPE, hang_up, send)
        return list(closed)

    assert asyncio.run(answered()) == [True]
