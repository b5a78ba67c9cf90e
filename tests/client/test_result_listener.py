"""Any number of results are awaited over one connection, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.results import failure_document
from llorch_worker.client import AsyncClient, BrokerUnavailable, result_listener
from llorch_worker.contract import InternalError
from tests.services import RedisServer, own_redis
from tests.waiting import wait_until

GET_S = 30.0


class Results:
    """What a Redis and its listeners look like from outside, and results stored as workers do."""

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url, decode_responses=True)

    def end(self, job_id: str, *, announced: bool = True) -> None:
        document = failure_document(job_id, InternalError(f"the end of {job_id}"))
        self.redis.set(keys.result(job_id), document)
        if announced:
            self.redis.publish(keys.result(job_id), document)

    async def listened_to(self, *job_ids: str) -> None:
        """Waits until these jobs' results are listened to."""
        wanted = {keys.result(job_id) for job_id in job_ids}
        await asyncio.to_thread(wait_until, lambda: wanted <= self._channels())

    async def not_listened_to(self, job_id: str) -> None:
        """Waits until that job's result is not."""
        await asyncio.to_thread(wait_until, lambda: keys.result(job_id) not in self._channels())

    def _channels(self) -> set[str]:
        return set(self.redis.pubsub_channels())


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with own_redis() as server:
        yield server


@pytest.fixture
def results(server: RedisServer) -> Iterator[Results]:
    results = Results(server.url)
    with results.redis:
        yield results


def run(server: RedisServer, use: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncClient(server.url) as client:
            await asyncio.wait_for(use(client), 2 * GET_S)

    asyncio.run(main())


async def ended(client: AsyncClient, job_id: str) -> None:
    with pytest.raises(InternalError, match=f"the end of {job_id}$"):
        await client.job(job_id).result(GET_S)


def test_hundreds_of_results_are_awaited_over_one_connection(
    server: RedisServer, results: Results
) -> None:
    ids = [f"job-{number}" for number in range(700)]

    async def use(client: AsyncClient) -> None:
        for job_id in ids[:100]:
            results.end(job_id)
        waits = asyncio.gather(*(ended(client, job_id) for job_id in ids))
        await results.listened_to(*ids[100:])
        # The other two: one for commands, and this test's own.
        assert len(results.redis.client_list()) <= 3
        for job_id in ids[100:]:
            results.end(job_id)
        await waits

    run(server, use)


def test_what_nobody_waits_for_is_heard_no_more(
    server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_listener, "RESULT_POLL_S", 0.05)

    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(ended(client, "late"))
        with pytest.raises(TimeoutError, match="given-up"):
            await client.job("given-up").result(0.2)
        await results.not_listened_to("given-up")
        await results.listened_to("late")
        results.end("late")
        await waits

    run(server, use)


def test_a_result_that_was_not_announced_is_found(
    server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_listener, "RESULT_POLL_S", 0.05)

    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(ended(client, "a"))
        await results.listened_to("a")
        results.end("a", announced=False)
        await waits

    run(server, use)


def test_two_who_wait_for_one_job_are_both_told_and_either_may_leave(
    server: RedisServer, results: Results
) -> None:
    async def use(client: AsyncClient) -> None:
        waits = [asyncio.create_task(ended(client, "a")) for _ in range(3)]
        await results.listened_to("a")
        waits[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        results.end("a")
        await asyncio.gather(*waits[1:])
        # Again, when its channel was listened to before.
        await ended(client, "a")

    run(server, use)


def test_a_lost_connection_is_opened_again(server: RedisServer, results: Results) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.gather(ended(client, "a"), ended(client, "b"))
        await results.listened_to("a", "b")
        (before,) = results.redis.client_list(_type="pubsub")
        results.redis.client_kill_filter(_type="pubsub")
        results.end("a")
        await results.listened_to("b")
        (after,) = results.redis.client_list(_type="pubsub")
        assert after["id"] != before["id"]
        results.end("b")
        await waits

    run(server, use)


def test_all_are_told_of_a_redis_that_is_gone_and_wait_again_when_it_is_back(
    server: RedisServer, results: Results
) -> None:
    async def use(client: AsyncClient) -> None:
        jobs = [client.job(name).result(GET_S) for name in ("a", "b")]
        waits = asyncio.gather(*jobs, return_exceptions=True)
        await results.listened_to("a", "b")
        await asyncio.to_thread(server.halt)
        assert [type(end) for end in await waits] == [BrokerUnavailable, BrokerUnavailable]
        await asyncio.to_thread(server.start)
        again = asyncio.create_task(ended(client, "a"))
        await results.listened_to("a")
        results.end("a")
        await again

    run(server, use)


def test_a_result_that_cannot_be_read_is_its_own_jobs_alone(
    server: RedisServer, results: Results
) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(ended(client, "b"))
        await results.listened_to("b")
        results.redis.set(keys.result("a"), "[]")
        with pytest.raises(ValueError, match="_Stored"):
            await client.job("a").result(GET_S)
        results.end("b")
        await waits

    run(server, use)


def test_a_closed_client_leaves_nobody_waiting(server: RedisServer, results: Results) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(client.job("a").result(GET_S))
        await results.listened_to("a")
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waits

    run(server, use)
