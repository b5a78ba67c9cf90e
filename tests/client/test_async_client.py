from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from llorch_worker.client import AsyncClient, BrokerUnavailable, StreamEntry
from llorch_worker.contract import Cancelled, Finished, InvalidRequest, Tokens
from tests.services import RedisServer, WorkerProcess, free_port

GET_S = 60

T = TypeVar("T")


def run(url: str, use: Callable[[AsyncClient], Awaitable[T]]) -> T:
    async def main() -> T:
        async with AsyncClient(url) as client:
            return await use(client)

    return asyncio.run(main())


def test_many_jobs_are_followed_in_one_thread(
    toy_worker: WorkerProcess, redis_server: RedisServer
) -> None:
    async def use(client: AsyncClient) -> list[list[StreamEntry]]:
        jobs = [await client.submit(prompt="x", max_tokens=20) for _ in range(8)]

        async def read(position: int) -> list[StreamEntry]:
            return [entry async for entry in jobs[position].stream(timeout=GET_S)]

        streams = await asyncio.gather(*(read(position) for position in range(8)))
        for job in jobs:
            assert len((await job.result(GET_S)).choices[0].token_ids) == 20
            assert (await job.status()).state == "succeeded"
        return streams

    for entries in run(redis_server.url, use):
        ids = [i for e in entries if isinstance(e.event, Tokens) for i in e.event.ids]
        assert ids == list(range(20))
        assert isinstance(entries[-1].event, Finished)


def test_a_reader_resumes_and_sees_a_cancel(
    toy_worker: WorkerProcess, redis_server: RedisServer
) -> None:
    async def use(client: AsyncClient) -> None:
        job = await client.submit(prompt="x", max_tokens=4000)
        async for entry in job.stream(timeout=GET_S):
            if isinstance(entry.event, Tokens):
                break
        assert await job.cancel()
        rest = [e async for e in client.job(job.id).stream(from_id=entry.entry_id)]
        assert rest[-1].event.type == "cancelled"
        with pytest.raises(Cancelled):
            await job.result(GET_S)

    run(redis_server.url, use)


def test_refusals_and_timeouts_are_those_of_the_client(
    toy_worker: WorkerProcess, redis_server: RedisServer
) -> None:
    async def use(client: AsyncClient) -> None:
        with pytest.raises(InvalidRequest):
            await client.submit(prompt="")
        job = await client.submit(prompt="x", max_tokens=4000)
        with pytest.raises(TimeoutError, match=job.id):
            await job.result(timeout=0.05)
        await job.cancel()
        assert [card.name for card in await client.models()] == ["toy"]
        assert len(await client.workers()) == 1

    run(redis_server.url, use)


def test_an_unreachable_redis_is_one_sentence() -> None:
    async def use(client: AsyncClient) -> None:
        for attempt in (client.submit(prompt="x"), client.job("a").result(5)):
            with pytest.raises(BrokerUnavailable, match="correct the URL"):
                await attempt

    run(f"redis://127.0.0.1:{free_port()}/0", use)
