"""The client that keeps its connections answers as redis-py's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from llorch_worker.broker.connection import connect
from llorch_worker.broker.lean_redis import LeanRedis
from llorch_worker.broker.transport import ClaimTransport
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.config import worker_config
from tests.services import RedisServer, own_redis, wait_until


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[LeanRedis]:
    """One that never tries again."""
    with lean(redis_server) as client:
        yield client


@contextmanager
def lean(server: RedisServer, **options: Any) -> Iterator[LeanRedis]:
    with LeanRedis.from_url(
        server.url, decode_responses=True, retry=Retry(NoBackoff(), 0), **options
    ) as client:
        yield client


@pytest.fixture
def stranger(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


def close_all(stranger: redis.Redis) -> None:
    """As a server that restarts, or one with a timeout for idle clients."""
    stranger.client_kill_filter(_type="normal", skipme=True)


def lent(client: LeanRedis) -> int:
    """Connections that the pool has lent and not got back."""
    return len(client.connection_pool._in_use_connections)


def test_replies_are_those_of_redis_py(client: LeanRedis, redis_server: RedisServer) -> None:
    def talk(to: redis.Redis) -> list[Any]:
        to.flushall()
        pairs: dict[Any, Any] = {"a": 1, "b": "ü"}
        return [
            to.set("text", "ü"), to.get("text"), to.get("none"), to.hset("hash", mapping=pairs),
            to.hgetall("hash"), to.zadd("set", {"x": 1.5}),
            to.zrange("set", 0, -1, withscores=True),
            to.xadd("stream", {"f": "v"}, id="1-0"), to.xrange("stream"), to.expire("text", 9),
            to.eval("return {1, 'two', {3}}", 0),
        ]  # fmt: skip

    with redis.Redis.from_url(redis_server.url, decode_responses=True) as stock:
        assert talk(client) == talk(stock)


def test_one_thread_needs_one_connection(client: LeanRedis) -> None:
    assert len({client.client_id() for _ in range(5)}) == 1
    assert lent(client) == 1


def test_every_thread_gets_its_own_reply(client: LeanRedis) -> None:
    def ask(number: int) -> Any:
        return client.echo(f"{number}")

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(2_000))) == [str(number) for number in range(2_000)]
    assert 1 <= lent(client) <= 8


def test_a_connection_that_was_closed_meanwhile_is_not_used(
    client: LeanRedis, stranger: redis.Redis
) -> None:
    client.set("key", "value")
    close_all(stranger)
    assert client.get("key") == "value"
    assert lent(client) == 1


def test_so_do_the_clients_of_kombu_and_celery(
    redis_server: RedisServer, stranger: redis.Redis
) -> None:
    app = Celery("claims", set_as_current=False)
    app.conf.update(worker_config(Settings(redis_url=redis_server.url)))
    with Connection(redis_server.url, transport=ClaimTransport) as connection:
        channel = connection.default_channel
        with channel.conn_or_acquire() as of_channel:
            clients = [of_channel, app.backend.client]
            assert all(isinstance(client, LeanRedis) for client in clients)
            for client in clients:
                client.set("key", "value")
            close_all(stranger)
            assert [client.get("key") for client in clients] == [b"value"] * 2


def test_a_redis_that_is_away_costs_no_connection(redis_server: RedisServer) -> None:
    with own_redis(binary=None) as server, lean(server, socket_timeout=0.1) as client:
        client.ping()
        with server.paused():
            for _ in range(3):
                with pytest.raises(redis.RedisError):
                    client.ping()
        assert client.ping()
        assert lent(client) == 1


def test_our_clients_try_again(redis_server: RedisServer, stranger: redis.Redis) -> None:
    with connect(redis_server.url) as client:
        client.set("key", "value")
        close_all(stranger)
        assert client.get("key") == "value"


def test_an_answer_that_nobody_waited_for_is_not_the_next_command_s(client: LeanRedis) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(_signal: int, _frame: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupt):
            client.blpop(["nothing"], timeout=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    client.rpush("nothing", "late")
    assert client.echo("mine") == "mine"


def test_a_refusal_leaves_the_connection_usable(client: LeanRedis) -> None:
    client.set("text", "x")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        client.lpush("text", "y")
    assert client.get("text") == "x"


def test_a_forked_child_has_connections_of_its_own(client: LeanRedis) -> None:
    mine = client.client_id()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(client.client_id()).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    theirs = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    assert theirs != mine
    assert client.client_id() == mine


def test_a_closed_client_holds_no_connection(
    redis_server: RedisServer, stranger: redis.Redis
) -> None:
    def normal() -> int:
        return len(stranger.client_list(_type="normal"))

    before = normal()
    with lean(redis_server) as client:
        client.ping()
        assert normal() == before + 1
    # Redis hears of the end when it next reads.
    wait_until(lambda: normal() == before)
