"""Any number of results are awaited over one connection, even if it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.results import failure_document
from llorch_worker.client import AsyncClient, BrokerUnavailable, result_listener
from llorch_worker.client.result_listener import TASK_NAME, ResultListener
from llorch_worker.contract import InternalError
from tests.faults.proxy import LOCALHOST, FaultProxy, contains
from tests.services import RedisServer
from tests.waiting import wait_until

GET_S = 30.0


class Results:
    """A Redis and its listeners seen from outside, and results stored as workers store them."""

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url, decode_responses=True)

    def end(self, job_id: str, *, announced: bool = True) -> None:
        document = failure_document(job_id, InternalError(f"the end of {job_id}"))
        self.redis.set(keys.result(job_id), document)
        if announced:
            self.redis.publish(keys.result(job_id), document)

    def calls(self, command: str) -> int:
        """How often any client sent that command."""
        figures = self.redis.info("commandstats").get(f"cmdstat_{command}")
        return figures["calls"] if figures else 0

    async def listened_to(self, *job_ids: str) -> None:
        """Waits until these jobs' results are listened to."""
        wanted = {keys.result(job_id) for job_id in job_ids}
        await asyncio.to_thread(wait_until, lambda: wanted <= self._channels())

    async def not_listened_to(self, job_id: str) -> None:
        """Waits until that job's result is not listened to."""
        await asyncio.to_thread(wait_until, lambda: keys.result(job_id) not in self._channels())

    def _channels(self) -> set[str]:
        return set(self.redis.pubsub_channels())


@pytest.fixture(autouse=True)
def _never_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test finds a result only in the way that it is about."""
    monkeypatch.setattr(result_listener, "RESULT_POLL_S", 100 * GET_S)


@pytest.fixture
def looks_often(_never_looks_by_itself: None, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(result_listener, "RESULT_POLL_S", 0.02)
    return 0.02


@pytest.fixture
def results(own_server: RedisServer) -> Iterator[Results]:
    results = Results(own_server.url)
    with results.redis:
        yield results


def run(url: str, use: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            await asyncio.wait_for(use(client), 2 * GET_S)

    asyncio.run(main())


async def ended(client: AsyncClient, job_id: str) -> None:
    with pytest.raises(InternalError, match=f"the end of {job_id}$"):
        await client.job(job_id).result(GET_S)


def listening() -> bool:
    """Whether the task of a listener runs on this event loop."""
    return TASK_NAME in {task.get_name() for task in asyncio.all_tasks()}


def test_hundreds_of_results_are_awaited_over_one_connection(
    own_server: RedisServer, results: Results
) -> None:
    ids = [f"job-{number}" for number in range(700)]

    async def use(client: AsyncClient) -> None:
        waits = asyncio.gather(*(ended(client, job_id) for job_id in ids))
        await results.listened_to(*ids)
        # The other two: one for commands, and this test's own.
        assert len(results.redis.client_list()) <= 3
        for job_id in ids:
            results.end(job_id)
        await waits

    run(own_server.url, use)


def test_results_that_exist_already_are_fetched_in_few_commands(
    own_server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_listener, "MOST_AT_ONCE", 20)
    ids = [f"job-{number}" for number in range(100)]
    for job_id in ids:
        results.end(job_id)

    async def use(client: AsyncClient) -> None:
        await asyncio.gather(*(ended(client, job_id) for job_id in ids))

    run(own_server.url, use)
    assert 5 <= results.calls("mget") < 50
    assert results.calls("subscribe") == 0


def test_a_job_that_nobody_waits_for_is_unsubscribed(
    own_server: RedisServer, results: Results, looks_often: float
) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(ended(client, "late"))
        await results.listened_to("late")
        with pytest.raises(TimeoutError, match="given-up"):
            await client.job("given-up").result(0.2)
        await results.not_listened_to("given-up")
        await results.listened_to("late")
        results.end("late")
        await waits
        await results.not_listened_to("late")
        async with asyncio.timeout(GET_S):
            while listening():
                await asyncio.sleep(0.01)

    run(own_server.url, use)


def test_a_result_that_was_not_announced_is_found(
    own_server: RedisServer, results: Results, looks_often: float
) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(ended(client, "a"))
        await results.listened_to("a")
        results.end("a", announced=False)
        await waits

    run(own_server.url, use)


def test_a_result_between_the_first_look_and_the_subscription_is_found(
    own_server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe = ResultListener._subscribe

    async def late(*arguments: Any) -> None:
        results.end("a")
        await subscribe(*arguments)

    monkeypatch.setattr(ResultListener, "_subscribe", late)
    run(own_server.url, lambda client: ended(client, "a"))


def test_two_waiters_for_one_job_both_get_its_end_and_either_may_leave(
    own_server: RedisServer, results: Results
) -> None:
    async def use(client: AsyncClient) -> None:
        first = asyncio.create_task(ended(client, "a"))
        await results.listened_to("a")
        others = [asyncio.create_task(ended(client, job_id)) for job_id in ("a", "a", "b")]
        # The task is asleep by then and must be woken for the newcomers.
        await results.listened_to("b")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        results.end("a")
        results.end("b")
        await asyncio.gather(*others)
        # Again, while its channel is still subscribed.
        await ended(client, "a")

    run(own_server.url, use)


@pytest.mark.parametrize("announced", [False, True])
def test_a_lost_connection_is_opened_again(
    own_server: RedisServer, results: Results, announced: bool
) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.gather(ended(client, "a"), ended(client, "b"))
        await results.listened_to("a", "b")
        (before,) = results.redis.client_list(_type="pubsub")
        if not announced:
            # Found after the reconnect, which looks for missed results.
            results.end("a", announced=False)
        results.redis.client_kill_filter(_type="pubsub")
        await results.listened_to("b")
        (after,) = results.redis.client_list(_type="pubsub")
        assert after["id"] != before["id"]
        if announced:
            results.end("a")
        results.end("b")
        await waits

    run(own_server.url, use)


def test_a_silent_connection_is_replaced(
    own_server: RedisServer, results: Results, looks_often: float
) -> None:
    with FaultProxy(LOCALHOST, own_server.port) as proxy:

        async def use(client: AsyncClient) -> None:
            # As after a firewall has dropped it: open and silent.
            dead = proxy.lose_request(contains("SUBSCRIBE"), freeze=True)
            waits = asyncio.gather(ended(client, "a"), ended(client, "b"))
            assert await asyncio.to_thread(dead.wait, GET_S)
            results.end("a")
            await results.listened_to("b")
            results.end("b")
            await waits

        run(proxy.url, use)


def test_a_lost_redis_fails_all_waits_and_new_ones_succeed_when_it_is_back(
    own_server: RedisServer, results: Results
) -> None:
    async def use(client: AsyncClient) -> None:
        jobs = [client.job(name).result(GET_S) for name in ("a", "b")]
        waits = asyncio.gather(*jobs, return_exceptions=True)
        await results.listened_to("a", "b")
        await asyncio.to_thread(own_server.halt)
        assert [type(end) for end in await waits] == [BrokerUnavailable, BrokerUnavailable]
        await asyncio.to_thread(own_server.start)
        again = asyncio.create_task(ended(client, "a"))
        await results.listened_to("a")
        results.end("a")
        await again

    run(own_server.url, use)


def test_an_unreadable_result_fails_only_its_own_job(
    own_server: RedisServer, results: Results
) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(ended(client, "b"))
        await results.listened_to("b")
        results.redis.set(keys.result("a"), "[]")
        with pytest.raises(ValueError, match="_Stored"):
            await client.job("a").result(GET_S)
        results.end("b")
        await waits

    run(own_server.url, use)


@pytest.mark.parametrize("turns", range(12))
def test_a_closed_client_leaves_nobody_waiting(own_server: RedisServer, turns: int) -> None:
    """Whatever the listener does in that turn of the event loop."""

    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(client.job("a").result(GET_S))
        for _ in range(1 + turns):
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waits
        with pytest.raises(RuntimeError, match="closed"):
            await client.job("a").result(GET_S)
        assert not listening()

    run(own_server.url, use)
