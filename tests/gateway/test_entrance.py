"""Requests begin a few an iteration of the event loop, and keys alternate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import pytest

from llorch_worker.gateway.entrance import MOST_AN_ITERATION, MOST_WAITING, entering

Begun = list[tuple[int, str]]
"""In which iteration of the loop a request began, and whose it was."""


KNOWN = ("alice", "bob")


def requests(
    keys: list[str],
    path: str = "/v1/jobs",
    cancelled: int = 0,
    header: str = "authorization",
    refused: list[Any] | None = None,
) -> Begun:
    """A request of each of ``keys``, all at once; the first ``cancelled`` that wait are given up.

    Every answer takes an iteration of its own, as if it waited for Redis.
    """

    async def run() -> Begun:
        loop = asyncio.get_running_loop()
        iteration, begun = 0, []

        def count() -> None:
            nonlocal iteration
            iteration += 1
            loop.call_soon(count)

        async def app(scope: Any, _receive: Any, _send: Any) -> None:
            begun.append((iteration, dict(scope["headers"])[header.encode()].decode()))
            await asyncio.sleep(0)

        def name_of(headers: Mapping[str, str]) -> str:
            return key if (key := headers[header]) in KNOWN else ""

        async def send(message: Any) -> None:
            if refused is not None and "status" in message:
                refused.append((message["status"], dict(message["headers"])[b"retry-after"]))

        entered: Callable[..., Awaitable[None]] = entering(app, name_of)

        def request(key: str) -> Coroutine[Any, Any, None]:
            headers = [(header.encode(), key.encode())]
            return entered({"type": "http", "path": path, "headers": headers}, None, send)

        async def ask(key: str) -> None:
            await request(key)

        loop.call_soon(count)
        tasks = [asyncio.create_task(ask(key)) for key in keys]
        await asyncio.sleep(0)
        for task in tasks[MOST_AN_ITERATION : MOST_AN_ITERATION + cancelled]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return begun

    return asyncio.run(run())


@pytest.mark.parametrize("cancelled", [0, 3, 1000])
def test_thousands_at_once_begin_a_few_an_iteration(cancelled: int) -> None:
    begun = requests(["alice"] * 2000, cancelled=cancelled)
    seen = [iteration for iteration, _ in begun]
    assert len(seen) == 2000 - cancelled
    assert max(map(seen.count, set(seen))) == MOST_AN_ITERATION
    assert len(set(seen)) == len(seen) / MOST_AN_ITERATION or cancelled % MOST_AN_ITERATION


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_key_with_one_request_does_not_wait_for_another_keys_thousands(header: str) -> None:
    begun = requests(["alice"] * 2000 + ["bob"], header=header)
    assert [key for _, key in begun].index("bob") <= 2 * MOST_AN_ITERATION


def test_keys_that_nobody_has_count_as_one() -> None:
    begun = requests([f"invented {number}" for number in range(2000)] + ["bob"])
    assert [key for _, key in begun].index("bob") <= 2 * MOST_AN_ITERATION


def test_more_than_may_wait_are_refused_and_nobody_else_is() -> None:
    refused: list[Any] = []
    invented = [f"invented {number}" for number in range(MOST_AN_ITERATION + MOST_WAITING + 5)]
    begun = requests([*invented, "bob"], refused=refused)
    assert refused == [(429, b"5")] * 5
    assert len(begun) == MOST_AN_ITERATION + MOST_WAITING + 1


def test_a_probe_begins_at_once() -> None:
    seen = {iteration for iteration, _ in requests(["nobody"] * 100, path="/health")}
    assert len(seen) == 1
