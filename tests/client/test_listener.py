"""Any number of results are awaited over one connection, even if it breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.jobs.results import StoredState, decode_state
from llorch_worker.client import AsyncClient, BrokerUnavailable, Client, listener
from llorch_worker.client.listener import TASK_NAME, Listener
from llorch_worker.contract import Failed, InternalError, JobLost
from llorch_worker.settings import Settings
from tests.client.stored_results import Results
from tests.faults.proxy import LOCALHOST, FaultProxy, contains
from tests.services import RedisServer
from tests.store import store_result

GET_S = 60


@pytest.fixture(autouse=True)
def _never_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test finds a result only in the way that it is about."""
    monkeypatch.setattr(listener, "RESULT_POLL_S", 100 * GET_S)


@pytest.fixture
def looks_often(_never_looks_by_itself: None, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(listener, "RESULT_POLL_S", 0.02)
    monkeypatch.setattr(listener, "LINGER_S", 0.0)
    return 0.02


@pytest.fixture
def results(redis_server: RedisServer) -> Iterator[Results]:
    results = Results(redis_server.url)
    with results.redis:
        results.redis.flushall()
        results.redis.config_resetstat()
        yield results


def run(url: str, use: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            await asyncio.wait_for(use(client), 2 * GET_S)

    asyncio.run(main())


async def ended(client: AsyncClient, job_id: str) -> None:
    with pytest.raises(InternalError, match=f"the end of {job_id}$"):
        await client.job(job_id).result(GET_S)


def ended_in_thread(url: str, job_id: str) -> None:
    with Client(url) as client, pytest.raises(InternalError, match=f"the end of {job_id}$"):
        client.job(job_id).result(GET_S)


def listening() -> bool:
    """Whether the task of a listener runs on this event loop."""
    return TASK_NAME in {task.get_name() for task in asyncio.all_tasks()}


def test_hundreds_of_results_are_awaited_over_one_connection(
    redis_server: RedisServer, results: Results
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

    run(redis_server.url, use)


def test_other_tasks_run_between_the_results_that_come_together(
    redis_server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"job-{number}" for number in range(20)]
    turns = 0
    turn_of_decode: list[int] = []

    def decode(document: str) -> StoredState:
        turn_of_decode.append(turns)
        return decode_state(document)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(listener, "decode_state", decode)
    for job_id in ids:
        results.end(job_id)

    async def use(client: AsyncClient) -> None:
        other = asyncio.create_task(count_turns())
        await asyncio.gather(*(ended(client, job_id) for job_id in ids))
        other.cancel()

    run(redis_server.url, use)
    assert len(set(turn_of_decode)) == len(ids)


@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_result_is_decoded_beside_the_event_loop(
    redis_server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    error = InternalError(f"{'x' * listener.SMALL_CHARS * is_long} the end of a")
    threads: list[int] = []

    def decode(document: str) -> StoredState:
        threads.append(threading.get_ident())
        return decode_state(document)

    monkeypatch.setattr(listener, "decode_state", decode)
    results.end("a", error)

    async def use(client: AsyncClient) -> None:
        await ended(client, "a")

    run(redis_server.url, use)
    assert [thread != threading.get_ident() for thread in threads] == [is_long]


def test_others_hear_of_their_ends_while_a_long_result_is_decoded(
    redis_server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def decode(document: str) -> StoredState:
        if len(document) > listener.SMALL_CHARS:
            begun.set()
            may_end.wait(GET_S)
        return decode_state(document)

    monkeypatch.setattr(listener, "decode_state", decode)
    results.end("a", InternalError(f"{'x' * listener.SMALL_CHARS} the end of a"))

    async def use(client: AsyncClient) -> None:
        long = asyncio.create_task(ended(client, "a"))
        await asyncio.to_thread(begun.wait, GET_S)
        results.end("b")
        try:
            await ended(client, "b")
            assert not long.done()
        finally:
            may_end.set()
        await long

    run(redis_server.url, use)


def test_any_number_of_long_results_are_decoded(
    redis_server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_DECODED", 2)
    ids = [f"job-{number}" for number in range(7)]
    for each in ids:
        results.end(each, InternalError(f"{'x' * listener.SMALL_CHARS} the end of {each}"))

    async def use(client: AsyncClient) -> None:
        await asyncio.gather(*(ended(client, each) for each in ids))

    run(redis_server.url, use)


def test_a_long_result_of_which_no_event_is_left_is_decoded_beside_the_event_loop(
    redis_server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def decode(document: str) -> StoredState:
        threads.append(threading.get_ident())
        return decode_state(document)

    monkeypatch.setattr(listener, "decode_state", decode)
    results.end("a", InternalError("x" * listener.SMALL_CHARS))

    async def use(client: AsyncClient) -> None:
        (entry,) = [each async for each in client.job("a").stream(timeout=GET_S)]
        assert isinstance(entry.event, Failed)

    run(redis_server.url, use)
    assert threads
    assert threading.get_ident() not in threads


def test_results_that_exist_already_are_fetched_in_few_commands(
    redis_server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_AT_ONCE", 20)
    ids = [f"job-{number}" for number in range(100)]
    for job_id in ids:
        results.end(job_id)

    async def use(client: AsyncClient) -> None:
        await asyncio.gather(*(ended(client, job_id) for job_id in ids))

    run(redis_server.url, use)
    assert 5 <= results.calls("mget") < 50
    assert results.calls("subscribe") == 0


def test_a_job_that_nobody_waits_for_is_unsubscribed(
    redis_server: RedisServer, results: Results, looks_often: float
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

    run(redis_server.url, use)


def test_a_result_that_was_not_announced_is_found(
    redis_server: RedisServer, results: Results, looks_often: float
) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(ended(client, "a"))
        await results.listened_to("a")
        results.end("a", announced=False)
        await waits

    run(redis_server.url, use)


@pytest.mark.usefixtures("looks_often")
def test_a_result_that_was_deleted_is_not_waited_for(
    redis_server: RedisServer, results: Results
) -> None:
    results.redis.hset(keys.job("job"), "state", "ended")

    async def main() -> None:
        async with AsyncClient(Settings(redis_url=redis_server.url, lease_s=1)) as client:
            with pytest.raises(JobLost):
                await client.job("job", known=True).result(GET_S)

    asyncio.run(main())


def test_a_result_between_the_first_look_and_the_subscription_is_found(
    redis_server: RedisServer, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe = Listener._subscribe

    async def late(*arguments: Any) -> None:
        results.end("a")
        await subscribe(*arguments)

    monkeypatch.setattr(Listener, "_subscribe", late)
    run(redis_server.url, lambda client: ended(client, "a"))


@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_the_end_of_a_job_of_the_same_id_in_another_database_is_not_this_jobs(
    redis_server: RedisServer, results: Results, client_class: type[Client] | type[AsyncClient]
) -> None:
    there = Results(redis_server.in_database(1))

    async def use(client: AsyncClient) -> None:
        if client_class is AsyncClient:
            waits = asyncio.create_task(ended(client, "a"))
        else:
            waits = asyncio.create_task(asyncio.to_thread(ended_in_thread, redis_server.url, "a"))
        await results.listened_to("a")
        there.end("a", InternalError("the end of another"))
        results.end("a")
        await waits

    with there.redis:
        run(redis_server.url, use)


def test_two_waiters_for_one_job_both_get_its_end_and_either_may_leave(
    redis_server: RedisServer, results: Results
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

    run(redis_server.url, use)


@pytest.mark.parametrize("announced", [False, True])
def test_a_lost_connection_is_opened_again(
    redis_server: RedisServer, results: Results, announced: bool
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

    run(redis_server.url, use)


def test_a_silent_connection_is_replaced(
    redis_server: RedisServer, results: Results, looks_often: float
) -> None:
    with FaultProxy(LOCALHOST, redis_server.port) as proxy:

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
    own_server: RedisServer,
) -> None:
    results = Results(own_server.url)

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

    with results.redis:
        run(own_server.url, use)


def test_an_unreadable_result_fails_only_its_own_job(
    redis_server: RedisServer, results: Results
) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(ended(client, "b"))
        await results.listened_to("b")
        store_result(results.redis, "a", "[]")
        with pytest.raises(ValueError, match="_Stored"):
            await client.job("a").result(GET_S)
        results.end("b")
        await waits

    run(redis_server.url, use)


@pytest.mark.parametrize("turns", range(12))
def test_after_a_cancelled_listener_task_the_next_wait_starts_anew(
    redis_server: RedisServer, results: Results, turns: int
) -> None:
    """In whatever turn of the event loop the task is cancelled, before its first step included."""

    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(client.job("a").result(GET_S))
        while not listening():
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        while not waits.done():
            # Again and again: redis-py may lose one cancellation while it connects.
            for task in asyncio.all_tasks():
                if task.get_name() == TASK_NAME:
                    task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="cancelled"):
            await waits
        again = asyncio.create_task(ended(client, "a"))
        await results.listened_to("a")
        results.end("a")
        await again

    run(redis_server.url, use)


def test_one_client_serves_one_event_loop_after_another(
    redis_server: RedisServer, results: Results
) -> None:
    client = AsyncClient(redis_server.url)

    async def use(job_id: str) -> None:
        waits = asyncio.create_task(ended(client, job_id))
        await results.listened_to(job_id)
        results.end(job_id)
        await waits
        (event,) = [entry.event async for entry in client.job(job_id).stream(timeout=GET_S)]
        assert isinstance(event, Failed)

    for job_id in ("a", "b", "c"):
        asyncio.run(asyncio.wait_for(use(job_id), GET_S))
    asyncio.run(client.close())


def test_a_client_in_use_on_one_event_loop_refuses_another(
    redis_server: RedisServer, results: Results
) -> None:
    async def use(client: AsyncClient) -> None:
        waits = asyncio.create_task(ended(client, "a"))
        await results.listened_to("a")
        for attempt in (client.job("a").result, client.close):
            with pytest.raises(RuntimeError, match="one event loop"):
                await asyncio.to_thread(asyncio.run, attempt())
        results.end("a")
        await waits

    run(redis_server.url, use)


@pytest.mark.parametrize("turns", range(12))
def test_a_closed_client_leaves_nobody_waiting(redis_server: RedisServer, turns: int) -> None:
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

    run(redis_server.url, use)
