"""A body costs what its bytes cost, on every route."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from fastapi import Response
from websockets.sync.client import connect

from llorch_worker.gateway.bodies import SMALL_BYTES, Bodies
from llorch_worker.gateway.routes import tokens
from llorch_worker.openai_api.tokens import TokenizeRequest
from tests.gateways import GatewayProcess

LARGE = 8 * 2**20
CONSOLE = ("/console/api/dead-letters/retry", "/console/api/dead-letters/drop")


def filled(before: str, item: str, after: str, size: int) -> bytes:
    """A body of at most ``size`` bytes, with as many items as it has room for."""
    count = (size - len(before) - len(after)) // (len(item) + 1)
    return f"{before}{','.join([item] * count)}{after}".encode()


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_every_route_counts_what_a_body_holds(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    routes = [
        path
        for path, methods in paths.items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    ]
    assert len(routes) >= 11
    body = filled('{"metadata": [', "[]", "]}", LARGE // 8)
    for route in (*routes, *CONSOLE):
        answer = http.post(route, content=body, headers={"Content-Type": "application/json"})
        assert "at most 100000 objects and lists" in refusal(answer), route


CHAT = '{"messages": [{"role": "user", "content": "Hi"}], '
TOOL = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": ['


# Made by the test alone: all of them are 30 MB, and every process would make them.
@pytest.mark.parametrize(
    ("make_body", "rule"),
    [
        (lambda: filled(CHAT + '"metadata": [', "[]", "]}", LARGE), "objects and lists"),
        (lambda: filled(CHAT + TOOL, "1", "]}}}]}", LARGE), "at most 1100000 values"),
        (
            lambda: filled(CHAT + '"chat_template_kwargs": {"a": [', "1", "]}}", LARGE),
            "at most 1100000 values",
        ),
        (
            lambda: filled(CHAT + TOOL, "1", "]}}}]}", LARGE // 4),
            "parameters: must be at most 262144 bytes as JSON",
        ),
        (lambda: names(600_000), "at most 100000 names and texts"),
        (lambda: names(1_001), "at most 1000 fields"),
        (
            lambda: filled(CHAT + '"stop_token_ids": [', '"a"', "]}", LARGE // 64),
            " rules; only up to 1000 are listed",
        ),
        (
            lambda: filled('{"messages": [', "{}", "]}", LARGE // 64),
            "messages: must have at most 1000",
        ),
    ],
)
def test_a_body_that_holds_too_much_is_refused_with_its_bound(
    http: httpx.Client, make_body: Callable[[], bytes], rule: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/chat/completions", content=make_body(), headers=headers)
    assert rule in refusal(answer)


def names(count: int) -> bytes:
    return json.dumps({f"f{n}": 1 for n in range(count)}).encode()


def test_a_message_of_a_socket_is_counted_too(gateway: GatewayProcess) -> None:
    body = filled('{"type": "response.create", "metadata": [', "[]", "]}", LARGE // 8)
    with connect(f"{gateway.url.replace('http', 'ws')}/v1/responses") as socket:
        socket.send(body.decode())
        error = json.loads(socket.recv(timeout=30))
    assert (error["status"], error["type"]) == (400, "error")
    assert "at most 100000 objects and lists" in error["error"]["message"]


def test_large_bodies_are_read_beside_the_event_loop_one_at_a_time() -> None:
    bodies, threads, release = Bodies(), set[int](), threading.Event()

    def work() -> None:
        threads.add(threading.get_ident())
        assert release.wait(30)

    async def large() -> None:
        jobs = asyncio.gather(*(bodies.run(SMALL_BYTES + 1, work) for _ in range(3)))
        async with asyncio.timeout(30):
            while bodies._one.statistics().tasks_waiting < 2:
                await asyncio.sleep(0)
        release.set()
        await jobs

    asyncio.run(large())
    assert threading.get_ident() not in threads

    async def small() -> int:
        return await bodies.run(SMALL_BYTES, threading.get_ident)

    assert asyncio.run(small()) == threading.get_ident()


def test_a_long_answer_of_ids_is_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    class Watched(tokens.Tokenized):
        def model_dump_json(self, **options: Any) -> str:
            threads.append(threading.get_ident())
            return super().model_dump_json(**options)

    async def asked(content: bytes) -> Response:
        card = SimpleNamespace(max_context=512)
        request = SimpleNamespace(body=AsyncMock(return_value=content))
        gateway = SimpleNamespace(
            check=lambda _: None,
            bodies=Bodies(),
            client=SimpleNamespace(model_card=AsyncMock(return_value=card)),
            ask=AsyncMock(return_value={"tokens": [7] * len(content)}),
        )
        body = TokenizeRequest(prompt=content.decode())
        return await tokens.tokenize(body, request, gateway)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens, "Tokenized", Watched)
    for size, beside in ((SMALL_BYTES, False), (SMALL_BYTES + 1, True)):
        answer = asyncio.run(asked(b"x" * size))
        assert json.loads(answer.body)["count"] == size
        assert (threads.pop() != threading.get_ident()) == beside
