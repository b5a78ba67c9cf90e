"""How far ahead of its answers a batch is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

from llorch_worker.batches.driver import WINDOWS_AHEAD, Driver
from llorch_worker.batches.endpoints import ENDPOINTS
from llorch_worker.batches.lines import Line, OpenAILine, OpenAIRules
from llorch_worker.batches.raw_lines import RawLine
from llorch_worker.client import AsyncClient

WINDOW = 4


def test_lines_with_many_prompts_are_not_all_in_memory() -> None:
    """Without Redis no job ends, so no line is answered."""
    assert asyncio.run(lines_read(prompts=8)) == WINDOWS_AHEAD * WINDOW / 8


async def lines_read(prompts: int) -> int:
    read = 0
    rules = OpenAIRules(ENDPOINTS, frozenset())
    body = {"model": "toy", "prompt": ["x"] * prompts}
    fields = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}

    async def lines() -> AsyncIterator[Line]:
        nonlocal read
        for read in range(1, 100):
            yield OpenAILine(RawLine(read, b""), fields, rules)

    waits = asyncio.Event()
    async with AsyncClient("redis://127.0.0.1:1") as client:
        driver = Driver(client, uuid4(), window=WINDOW, on_wait=lambda _: waits.set())
        first = asyncio.create_task(anext(driver.ends(lines())))
        await waits.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    return read
