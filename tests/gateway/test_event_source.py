"""A stream of events is closed whenever its client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llorch_worker.client.stream import Position
from llorch_worker.contract import Tokens
from llorch_worker.gateway import comments
from llorch_worker.gateway.connections import COMMENT, connections
from llorch_worker.gateway.errors import HttpError
from llorch_worker.gateway.event_source import EventSource, begun_event_source, encoded
from llorch_worker.gateway.routes.jobs import sent_event
from tests.services import LOCALHOST, free_port

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}


def failure(error: Exception) -> bytes:
    return f"event: error\ndata: {error}\n\n".encode()


def test_no_text_breaks_the_line_of_an_event() -> None:
    """Also for clients that know more ends of lines than events have, as ``splitlines`` does."""
    text = "a\u0085b\u2028c\u2029d\r\n\v\f\x1c\x1d\x1ee"
    of_job = sent_event(Tokens(index=0, text=text, ids=(1,)), Position())
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


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[int]:
    """The port of a server as the gateway's."""
    port = free_port()
    http = connections(30, 100)
    config = uvicorn.Config(app, LOCALHOST, port, http=http, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield port
    server.should_exit = True
    await serving


async def asked(port: int, path: str = "/") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has the header of its answer."""
    reader, writer = await asyncio.open_connection(LOCALHOST, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


def test_streams_that_wait_have_two_tasks_each_and_comments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comments, "COMMENT_S", 0.1)
    streams, closed = 20, 0

    async def body() -> AsyncGenerator[bytes]:
        nonlocal closed
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            closed += 1

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventSource(body())(scope, receive, send)

    async def main() -> None:
        async with served(app) as port:
            before = len(asyncio.all_tasks())
            clients = [await asked(port) for _ in range(streams)]
            assert len(asyncio.all_tasks()) - before == 2 * streams
            for reader, _ in clients:
                for _ in range(2):
                    await reader.readuntil(COMMENT)
            for _, writer in clients:
                writer.close()
            while closed < streams:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_at_a_stop_a_stream_of_a_job_that_goes_on_ends_and_others_do_not() -> None:
    ends = asyncio.Event()

    async def body() -> AsyncGenerator[bytes]:
        yield b"data: x\n\n"
        await ends.wait()
        yield b"data: y\n\n"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventSource(body(), ends_at_stop=scope["path"] == "/job")(scope, receive, send)

    async def main() -> None:
        async with served(app) as port:
            job, _job_writer = await asked(port, "/job")
            chat, _chat_writer = await asked(port, "/chat")
            for reader in (job, chat):
                await reader.readuntil(b"data: x\n\n")

            async def read_job() -> bytes:
                rest = await job.readuntil(b"0\r\n\r\n")
                ends.set()
                return rest

            reading = asyncio.create_task(read_job())
        assert b"data" not in await reading
        assert b"data: y" in await chat.read()

    asyncio.run(asyncio.wait_for(main(), 60))
