"""How far ahead of its answers a batch is read, and what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import UUID, uuid4

import redis

from llorch_worker.batches.driver import WINDOWS_AHEAD, Driver
from llorch_worker.batches.endpoints import ENDPOINTS
from llorch_worker.batches.lines import Line, OpenAILine, OpenAIRules
from llorch_worker.batches.raw_lines import RawLine
from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.jobs.claims import fail
from llorch_worker.client import AsyncClient
from llorch_worker.client.admission import MODELS_FRESH_S
from llorch_worker.contract import (
    AttemptsExhausted,
    IdempotencyKeyReused,
    InternalError,
    LlorchError,
)
from llorch_worker.settings import Settings
from tests.broker.steps import TERMS, announce, take
from tests.services import RedisServer

WINDOW = 4
GET_S = 60
RULES = OpenAIRules(ENDPOINTS, frozenset())


def line(number: int, model: str, prompts: int = 1) -> Line:
    body = {"model": model, "prompt": ["x"] * prompts}
    fields = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}
    return OpenAILine(RawLine(number, b""), fields, RULES)


def test_lines_with_many_prompts_are_not_all_in_memory() -> None:
    """Without Redis no job ends, so no line is answered."""
    assert asyncio.run(lines_read(prompts=8)) == WINDOWS_AHEAD * WINDOW / 8


async def lines_read(prompts: int) -> int:
    read = 0

    async def lines() -> AsyncIterator[Line]:
        nonlocal read
        for read in range(1, 100):
            yield line(read, "toy", prompts)

    waits = asyncio.Event()
    async with AsyncClient("redis://127.0.0.1:1") as client:
        driver = Driver(client, uuid4(), window=WINDOW, on_wait=lambda _: waits.set())
        first = asyncio.create_task(anext(driver.ends(lines())))
        await waits.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    return read


def test_lines_share_an_idempotency_key_only_if_they_ask_for_the_same(
    own_server: RedisServer,
) -> None:
    with connect(own_server.url) as store:
        ends = asyncio.run(asyncio.wait_for(ends_of_one_key(store, own_server.url), GET_S))
    assert ends == [AttemptsExhausted] * 2 + [IdempotencyKeyReused] * 2


async def ends_of_one_key(store: redis.Redis, url: str) -> list[type]:
    announce(store)

    async def lines() -> AsyncIterator[Line]:
        for number, changed in enumerate(({}, {}, {"prompt": "y"}, {"max_tokens": 3}), 1):
            body = {"model": "toy", "prompt": "x", "idempotency_key": "k", **changed}
            fields = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions"}
            yield OpenAILine(RawLine(number, b""), {**fields, "body": body}, RULES)
            if number == 1:
                while not (claims := take(store)):
                    await asyncio.sleep(0.01)
                assert fail(store, claims[0], AttemptsExhausted("it kills workers"), TERMS)

    async with AsyncClient(url) as client:
        driver = Driver(client, uuid4(), window=1)
        return [type(end) async for _, end in driver.ends(lines())]


def test_a_batch_waits_for_a_model_that_redis_has_forgotten(own_server: RedisServer) -> None:
    with connect(own_server.url) as store:
        assert asyncio.run(asyncio.wait_for(answers(store, own_server.url), GET_S)) == [
            "INTERNAL",
            "INTERNAL",
            "MODEL_NOT_SERVED",
        ]


async def answers(store: redis.Redis, url: str) -> list[str]:
    """The codes of three lines. The model of the first two is forgotten in between."""
    announce(store)

    async def lines() -> AsyncIterator[Line]:
        yield line(1, "toy")
        await fail_next(store)
        store.delete(keys.MODELS)
        # The client knows it for a while.
        await asyncio.sleep(MODELS_FRESH_S)
        yield line(2, "toy")
        await fail_next(store)
        yield line(3, "never served")

    async with AsyncClient(url) as client:
        driver = Driver(client, uuid4(), window=1, on_wait=lambda _: announce(store))
        ends = [end async for _, end in driver.ends(lines())]
        return [end.code for end in ends if isinstance(end, LlorchError)]


def test_a_job_that_redis_lost_is_sent_again(own_server: RedisServer) -> None:
    with connect(own_server.url) as store:
        announce(store)

        async def lose() -> None:
            while not store.zcard(keys.waiting("toy")):
                await asyncio.sleep(0.01)
            store.flushall()
            announce(store)
            await fail_next(store)

        assert asyncio.run(asyncio.wait_for(code_of_one(own_server.url, lose), GET_S)) == "INTERNAL"


def test_a_job_whose_result_was_deleted_is_not_run_again(own_server: RedisServer) -> None:
    batch_id = uuid4()
    with connect(own_server.url) as store:
        announce(store)
        first = code_of_one(own_server.url, lambda: fail_next(store), batch_id)
        assert asyncio.run(asyncio.wait_for(first, GET_S)) == "INTERNAL"
        (result,) = store.keys(keys.result("*"))
        store.delete(result)
        again = code_of_one(own_server.url, lambda: asyncio.sleep(0), batch_id)
        assert asyncio.run(asyncio.wait_for(again, GET_S)) == "JOB_LOST"
        assert not take(store)


async def fail_next(store: redis.Redis) -> None:
    while not (claims := take(store)):
        await asyncio.sleep(0.01)
    assert fail(store, claims[0], InternalError("the end"), TERMS)


async def code_of_one(
    url: str, meanwhile: Callable[[], Awaitable[None]], batch_id: UUID | None = None
) -> str:
    """The code of a line that fails."""

    async def lines() -> AsyncIterator[Line]:
        yield line(1, "toy")
        await meanwhile()

    async with AsyncClient(Settings(redis_url=url, lease_s=1)) as client:
        driver = Driver(client, batch_id or uuid4(), window=1)
        ((_, end),) = [each async for each in driver.ends(lines())]
        assert isinstance(end, LlorchError)
        return end.code
