"""Readers of streams wait over one connection, which tells them what is written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis

from llorch_worker.broker import keys, scripts
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.jobs import journal
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.client import AsyncClient, AsyncJob, Client, feed, listener
from llorch_worker.contract import Event, Started, Tokens, encode_event
from tests.broker.steps import claim_on
from tests.services import RedisServer
from tests.store import add_entry
from tests.waiting import wait_until

GET_S = 60
POLLS = 3
STARTED = Started(
    worker="w", model="m", model_fingerprint="f", prompt_tokens=1, queue_ms=0, attempt=1
)


def token(index: int) -> Tokens:
    return Tokens(index=index, ids=(index,), text=f"{index} ")


class Writer:
    """A worker that writes to streams, and Redis as it sees it."""

    def __init__(self, url: str) -> None:
        self.redis: redis.Redis = connect(url)
        scripts.load(self.redis, "append")
        self._claims: dict[str, Claim] = {}
        self._next: dict[str, int] = {}

    def begin(self, *job_ids: str) -> None:
        for job_id in job_ids:
            self._claims[job_id], self._next[job_id] = claim_on(job_id, 1), 1
            self.redis.hset(keys.job(job_id), mapping={"state": "claimed", "fence": 1})

    def write(self, job_id: str, *events: Event) -> int:
        """The reply to the write."""
        with self.redis.pipeline(transaction=False) as pipe:
            journal.queue_append(pipe, self._claims[job_id], self._next[job_id], events)
            (written,) = pipe.execute()
        self._next[job_id] += len(events)
        return int(written)

    def calls(self) -> dict[str, int]:
        """How often each command was sent or called by a script."""
        stats = self.redis.info("commandstats")
        return {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}

    async def followed(self, *job_ids: str, db: int = 0) -> None:
        """Waits until these streams are listened to."""
        wanted = {keys.events_channel(db, job_id) for job_id in job_ids}

        def are() -> bool:
            return wanted <= set(self.redis.pubsub_channels())

        await asyncio.to_thread(wait_until, are)

    async def looked(self, times: int) -> None:
        """Waits until streams were read so often."""
        await asyncio.to_thread(wait_until, lambda: self.calls().get("xread", 0) >= times)


@pytest.fixture(autouse=True)
def _never_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test finds what it is about only in the way that it is about."""
    monkeypatch.setattr(listener, "RESULT_POLL_S", 100 * GET_S)


@pytest.fixture
def writer(redis_server: RedisServer) -> Iterator[Writer]:
    writer = Writer(redis_server.url)
    with writer.redis:
        writer.redis.flushall()
        writer.redis.config_resetstat()
        yield writer


def run(url: str, use: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client:
            await asyncio.wait_for(use(client), 2 * GET_S)

    asyncio.run(main())


async def tokens(job: AsyncJob, count: int, patience_s: float = 0.0) -> list[int]:
    """Its first ``count`` tokens."""
    found: list[int] = []
    async for entry in job.stream(timeout=GET_S, patience_s=patience_s):
        if isinstance(entry.event, Tokens):
            found += entry.event.ids
        if len(found) >= count:
            break
    return found


def test_streams_that_wait_send_redis_nothing_and_share_a_connection(
    redis_server: RedisServer, writer: Writer
) -> None:
    ids = [f"job-{number}" for number in range(300)]
    writer.begin(*ids)

    async def use(client: AsyncClient) -> None:
        reads = asyncio.gather(*(tokens(client.job(job_id), 1) for job_id in ids))
        await writer.followed(*ids)
        await writer.looked(len(ids))
        assert len(writer.redis.client_list(_type="pubsub")) == 1
        writer.redis.config_resetstat()
        for job_id in ids:
            assert writer.write(job_id, token(7)) & journal.IS_READ
        assert await reads == [[7]] * len(ids)
        sent = writer.calls().keys() & {"xread", "get", "hmget", "set", "mget", "exists", "ping"}
        assert writer.calls()["publish"] == len(ids)
        # HMGET and EXISTS are the writer's.
        assert sent <= {"hmget", "exists"}

    run(redis_server.url, use)


def test_a_poll_costs_few_commands_however_many_streams_wait(
    redis_server: RedisServer, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "RESULT_POLL_S", 0.05)
    ids = [f"job-{number}" for number in range(200)]
    writer.begin(*ids)

    async def use(client: AsyncClient) -> None:
        reads = asyncio.gather(*(tokens(client.job(job_id), 1) for job_id in ids))
        await writer.followed(*ids)
        await writer.looked(len(ids))
        writer.redis.config_resetstat()
        await asyncio.to_thread(wait_until, lambda: writer.calls().get("ping", 0) >= POLLS)
        calls = writer.calls()
        assert calls["mget"] <= 2 * POLLS
        assert calls["exists"] <= 2 * POLLS
        assert not calls.keys() & {"get", "set", "hmget", "xread", "subscribe"}
        reads.cancel()

    run(redis_server.url, use)


def test_tokens_that_flow_are_not_read_but_told(redis_server: RedisServer, writer: Writer) -> None:
    writer.begin("a")

    async def use(client: AsyncClient) -> None:
        read = asyncio.create_task(tokens(client.job("a"), 50))
        await writer.followed("a")
        await writer.looked(1)
        for index in range(50):
            writer.write("a", token(index))
        assert await read == list(range(50))
        assert writer.calls()["xread"] == 1

    run(redis_server.url, use)


def test_a_reader_that_falls_behind_reads_the_stream(
    redis_server: RedisServer, writer: Writer
) -> None:
    writer.begin("a")
    written = 3 * feed.MOST_UNREAD

    async def use(client: AsyncClient) -> None:
        stream = client.job("a").stream(timeout=GET_S)
        first = asyncio.create_task(anext(stream))
        await writer.followed("a")
        await writer.looked(1)
        writer.write("a", STARTED)
        assert (await first).event == STARTED
        for index in range(written):
            writer.write("a", token(index))
        found: list[int] = []
        while len(found) < written:
            event = (await anext(stream)).event
            assert isinstance(event, Tokens)
            found += event.ids
            await asyncio.sleep(0.001)
        assert found == list(range(written))
        await stream.aclose()

    run(redis_server.url, use)


def test_a_second_reader_of_a_followed_stream_sees_it_from_the_start(
    redis_server: RedisServer, writer: Writer
) -> None:
    writer.begin("a")

    async def use(client: AsyncClient) -> None:
        first = asyncio.create_task(tokens(client.job("a"), 3))
        await writer.followed("a")
        await writer.looked(1)
        writer.write("a", token(0), token(1))
        second = asyncio.create_task(tokens(client.job("a"), 3))
        await writer.looked(2)
        writer.write("a", token(2))
        assert await asyncio.gather(first, second) == [[0, 1, 2]] * 2

    run(redis_server.url, use)


def test_what_is_written_while_the_connection_is_lost_is_read(
    redis_server: RedisServer, writer: Writer
) -> None:
    writer.begin("a", "b")

    async def use(client: AsyncClient) -> None:
        reads = asyncio.gather(tokens(client.job("a"), 2), tokens(client.job("b"), 1))
        await writer.followed("a", "b")
        await writer.looked(2)
        # Nobody is told of it.
        add_entry(writer.redis, "a", encode_event(token(0)), "1-0")
        writer.redis.client_kill_filter(_type="pubsub")
        await writer.looked(4)
        writer.write("b", token(5))
        add_entry(writer.redis, "a", encode_event(token(1)), "2-0")
        writer.redis.client_kill_filter(_type="pubsub")
        assert await reads == [[0, 1], [5]]

    run(redis_server.url, use)


def test_a_redis_that_restarts_is_only_a_pause_for_all_who_wait(own_server: RedisServer) -> None:
    writer = Writer(own_server.url)
    ids = [f"job-{number}" for number in range(20)]
    writer.begin(*ids)

    async def use(client: AsyncClient) -> None:
        patient = asyncio.gather(*(tokens(client.job(job_id), 1, GET_S) for job_id in ids))
        impatient = asyncio.create_task(tokens(client.job(ids[0]), 1))
        await writer.followed(*ids)
        await asyncio.to_thread(own_server.halt)
        with pytest.raises(Exception, match="No Redis"):
            await impatient
        await asyncio.to_thread(own_server.start)
        scripts.load(writer.redis, "append")
        for job_id in ids:
            await asyncio.to_thread(writer.write, job_id, token(3))
        assert await patient == [[3]] * len(ids)

    with writer.redis:
        run(own_server.url, use)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_events_of_the_same_id_in_another_database_are_not_this_jobs(
    redis_server: RedisServer, writer: Writer, kind: type[Client] | type[AsyncClient]
) -> None:
    there = Writer(redis_server.in_database(1))
    writer.begin("a")
    there.begin("a")

    def first_of_thread() -> list[int]:
        with Client(redis_server.url) as client:
            for entry in client.job("a").stream(timeout=GET_S):
                assert isinstance(entry.event, Tokens)
                return list(entry.event.ids)
        return []

    async def use(client: AsyncClient) -> None:
        if kind is AsyncClient:
            read = asyncio.create_task(tokens(client.job("a"), 1))
        else:
            read = asyncio.create_task(asyncio.to_thread(first_of_thread))
        await writer.followed("a")
        assert not there.write("a", token(8)) & journal.IS_READ
        writer.write("a", token(9))
        assert await read == [9]

    with there.redis:
        run(redis_server.url, use)


def test_a_stream_that_was_submitted_to_be_read_is_read_before_its_reader_comes(
    writer: Writer,
) -> None:
    """Its first tokens come apart, whoever is first."""
    writer.begin("a", "b", "c")
    seconds, _ = writer.redis.time()
    writer.redis.hset(keys.job("b"), "awaited_s", seconds + GET_S)
    writer.redis.hset(keys.job("c"), "awaited_s", seconds)
    replies = [writer.write(job_id, token(0)) for job_id in ("a", "b", "c")]
    read = journal.WRITTEN | journal.IS_READ
    assert replies == [journal.WRITTEN, read, journal.WRITTEN]
