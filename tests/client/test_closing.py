"""A closed client raises, also in threads and tasks that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from llorch_worker.broker.jobs.results import failure_document
from llorch_worker.client import AsyncClient, Client, Job
from llorch_worker.contract import InternalError
from tests.services import RedisServer
from tests.store import store_result
from tests.waiting import wait_until

TOLD_S = 30.0
JOB_S = 4 * TOLD_S
"""Longer than any test waits."""


@pytest.fixture
def observer(own_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_server.url, decode_responses=True) as observer:
        yield observer


def someone_listens(observer: redis.Redis) -> bool:
    return bool(observer.pubsub_channels())


def is_alone(observer: redis.Redis) -> bool:
    return len(observer.client_list()) == 1


def wait_for_result(job: Job) -> object:
    return job.result(JOB_S)


def read_stream(job: Job) -> object:
    return list(job.stream(timeout=JOB_S))


@pytest.mark.parametrize("use", [wait_for_result, read_stream])
def test_closing_ends_the_waits_of_threads(
    own_server: RedisServer,
    observer: redis.Redis,
    use: Callable[[Job], object],
) -> None:
    client = Client(own_server.url)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(use, client.job("a")) for _ in range(3)]
        wait_until(lambda: someone_listens(observer))
        client.close()
        for each in waiting:
            with pytest.raises(RuntimeError, match="the client was closed"):
                each.result(TOLD_S)
    wait_until(lambda: is_alone(observer))


def test_closing_ends_the_reads_of_a_task(own_server: RedisServer, observer: redis.Redis) -> None:
    async def main() -> None:
        client = AsyncClient(own_server.url)

        async def read() -> None:
            async for _ in client.job("a").stream(timeout=JOB_S):
                raise AssertionError("nobody sent this")

        reads = asyncio.create_task(read())
        await asyncio.to_thread(wait_until, lambda: someone_listens(observer))
        await client.close()
        with pytest.raises(RuntimeError, match="the client was closed"):
            await asyncio.wait_for(reads, TOLD_S)
        with pytest.raises(RuntimeError, match="the client was closed"):
            await client.submit(prompt="x")
        with pytest.raises(RuntimeError, match="the client was closed"):
            await anext(client.job("a").stream())

    asyncio.run(main())
    wait_until(lambda: is_alone(observer))


def test_a_closed_client_sends_nothing(own_server: RedisServer, observer: redis.Redis) -> None:
    client = Client(own_server.url)
    client.models()
    job = client.job("a")
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(job.result, JOB_S)
        wait_until(lambda: someone_listens(observer))
        end = failure_document(job.id, InternalError("the end"))
        store_result(observer, job.id, end, publish=True)
        with pytest.raises(InternalError):
            waits.result(TOLD_S)
    client.close()
    for use in (
        lambda: client.submit(prompt="x"),
        lambda: job.result(JOB_S),
        lambda: next(job.stream()),
        job.cancel,
        job.status,
        client.models,
        client.workers,
    ):
        with pytest.raises(RuntimeError, match="the client was closed"):
            use()
    wait_until(lambda: is_alone(observer))


def test_closing_raises_nothing_if_redis_reads_nothing(own_server: RedisServer) -> None:
    async def close() -> None:
        client = AsyncClient(own_server.url)
        connection = await client.redis.connection_pool.get_connection()
        connection.socket_connect_timeout = 0.1
        with own_server.paused():
            # More than the sockets hold: a connection that closes sends what is left first.
            connection._writer.write(b"x" * 2**24)
            await client.close()
            assert connection._writer is None

    asyncio.run(close())
