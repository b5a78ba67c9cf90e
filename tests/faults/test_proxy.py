"""The faults that other tests rely on: what passes, what arrives late, what is lost."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from tests.faults.proxy import LOCALHOST, FaultProxy, contains
from tests.faults.resp import Framer
from tests.services import RedisServer, wait_until

SHORT_S = 0.2
LONG_S = 10.0
SCRIPT = "redis.call('SET', KEYS[1], ARGV[1]) return ARGV[1]"


@pytest.fixture
def direct(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def proxy(redis_server: RedisServer, direct: redis.Redis) -> Iterator[FaultProxy]:
    with FaultProxy(LOCALHOST, redis_server.port) as proxy:
        yield proxy


def through(proxy: FaultProxy, timeout_s: float = LONG_S, protocol: int = 2) -> redis.Redis:
    """A client that tries once and gives up after ``timeout_s``."""
    return redis.Redis.from_url(
        proxy.url,
        socket_timeout=timeout_s,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
        protocol=protocol,
    )


class Failing:
    """Makes a call on another thread, and expects it to lose its connection."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._failures: list[ConnectionError] = []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except ConnectionError as error:
            self._failures.append(error)

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def assert_failed(self) -> None:
        self._thread.join(LONG_S)
        assert len(self._failures) == 1


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_healthy_proxy_changes_nothing(proxy: FaultProxy, protocol: int) -> None:
    with through(proxy, protocol=protocol) as client:
        big = "x" * 3_000_000
        pipe = client.pipeline()
        for number in range(500):
            pipe.rpush("list", number)
        pipe.set("big", big)
        pipe.get("big")
        assert pipe.execute()[-1] == big
        assert client.lrange("list", 0, -1) == [str(number) for number in range(500)]
        with client.pubsub() as pubsub:
            pubsub.subscribe("news")
            client.publish("news", "hello")
            heard = wait_until(lambda: pubsub.get_message(ignore_subscribe_messages=True))
            assert heard["data"] == "hello"


def test_held_bytes_arrive_late_even_from_a_client_that_is_gone(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    with through(proxy, SHORT_S) as client:
        client.ping()
        proxy.hold()
        with pytest.raises(TimeoutError):
            client.set("late", "1")
    assert direct.get("late") is None
    assert proxy.open_connections == 1, "Redis does not know that the client is gone"
    proxy.heal()
    assert wait_until(lambda: direct.get("late")) == "1"
    wait_until(lambda: proxy.open_connections == 0)


def test_a_blackhole_swallows_bytes_and_resets_connections_when_it_heals(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    with through(proxy) as client, through(proxy) as idle:
        client.ping()
        connection = idle.client_id()
        proxy.blackhole()
        writing = Failing(lambda: client.set("swallowed", "1"))
        with through(proxy, SHORT_S) as newcomer, pytest.raises(TimeoutError):
            newcomer.ping()
        assert writing.waits
        proxy.heal()
        writing.assert_failed()
        assert direct.get("swallowed") is None
        assert idle.client_id() == connection, "a connection that lost nothing lives on"


def test_a_reset_ends_every_connection_with_rst_and_accepts_new_ones(proxy: FaultProxy) -> None:
    with socket.create_connection((LOCALHOST, proxy.port), LONG_S) as raw:
        raw.sendall(b"PING\r\n")
        assert raw.recv(100) == b"+PONG\r\n"
        proxy.reset()
        assert proxy.open_connections == 0
        with pytest.raises(ConnectionResetError):
            raw.recv(100)
    with through(proxy) as client:
        assert client.ping()


def test_an_isolated_redis_accepts_no_connection_until_the_proxy_heals(proxy: FaultProxy) -> None:
    with through(proxy) as client:
        client.ping()
        proxy.isolate()
        for _ in range(2):
            with pytest.raises(ConnectionError):
                client.ping()
        proxy.heal()
        assert client.ping()


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_reply_is_lost_after_the_script_ran(
    proxy: FaultProxy, direct: redis.Redis, protocol: int
) -> None:
    direct.script_flush()
    sha = hashlib.sha1(SCRIPT.encode()).hexdigest()
    with through(proxy, protocol=protocol) as client:
        script = client.register_script(SCRIPT)
        trap = proxy.lose_reply(contains("EVALSHA", sha))
        with pytest.raises(ConnectionError):
            # redis-py sends EVALSHA, receives NOSCRIPT, loads the script and sends EVALSHA again.
            script(keys=["by script"], args=["7"])
        assert trap.wait(LONG_S)
        assert direct.get("by script") == "7"
        assert script(keys=["again"], args=["8"]) == "8", "a trap springs once"


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_only_the_matching_request_of_a_pipeline_is_lost(
    proxy: FaultProxy, direct: redis.Redis, lost: str
) -> None:
    with through(proxy) as client:
        set_trap = proxy.lose_request if lost == "request" else proxy.lose_reply
        trap = set_trap(contains("SET", "lost"))
        pipe = client.pipeline(transaction=False)
        pipe.set("before", "1")
        pipe.set("lost", "1")
        with pytest.raises(ConnectionError):
            pipe.execute()
        assert trap.wait(LONG_S)
        wait_until(lambda: direct.get("before"))
        assert direct.get("lost") == (None if lost == "request" else "1")


SET_HALF = b"*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$1\r\n1\r\n"


def read_all(raw: socket.socket) -> bytes:
    """What arrives until the connection breaks."""
    found = b""
    with suppress(ConnectionResetError):
        while data := raw.recv(100):
            found += data
    return found


@pytest.mark.parametrize("after_bytes", [0, 1, len(SET_HALF) - 1, len(SET_HALF)])
def test_a_request_is_cut_after_so_many_bytes(
    proxy: FaultProxy, direct: redis.Redis, after_bytes: int
) -> None:
    with socket.create_connection((LOCALHOST, proxy.port), LONG_S) as raw:
        # Redis 7 and later refuse, unread, a connection that was reset before they accepted it.
        raw.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert raw.recv(100) == b"+PONG\r\n"
        trap = proxy.cut_request(contains("half"), after_bytes)
        raw.sendall(SET_HALF)
        read_all(raw)
    assert trap.wait(LONG_S)
    assert trap.size == len(SET_HALF)
    ran = after_bytes == len(SET_HALF)
    assert wait_until(lambda: direct.get("half") == ("1" if ran else None))


@pytest.mark.parametrize("after_bytes", range(6))
def test_a_reply_is_cut_after_so_many_bytes(
    proxy: FaultProxy, direct: redis.Redis, after_bytes: int
) -> None:
    with socket.create_connection((LOCALHOST, proxy.port), LONG_S) as raw:
        trap = proxy.cut_reply(contains("half"), after_bytes)
        raw.sendall(SET_HALF)
        assert read_all(raw) == b"+OK\r\n"[:after_bytes]
    assert trap.size == 5
    assert direct.get("half") == "1"


def test_a_frozen_connection_stays_silent_while_others_go_on(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    with through(proxy) as client, through(proxy) as neighbour:
        trap = proxy.lose_reply(contains("INCR"), freeze=True)
        counting = Failing(lambda: client.incr("count"))
        assert trap.wait(LONG_S)
        assert counting.waits
        assert direct.get("count") == "1"
        assert neighbour.incr("count") == 2
        proxy.heal()
        counting.assert_failed()


MESSAGES = st.recursive(
    st.one_of(
        st.sampled_from([b"+OK\r\n", b"-ERR no\r\n", b":-7\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n"]),
        st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"$0\r\n\r\n", b"*0\r\n", b"%0\r\n"]),
        st.binary(max_size=40).map(lambda data: b"$%d\r\n%s\r\n" % (len(data), data)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda parts: b"*%d\r\n%s" % (len(parts), b"".join(parts))),
        st.lists(inner, max_size=3).map(
            lambda parts: b"%%%d\r\n%s" % (len(parts), b"".join(part * 2 for part in parts))
        ),
        inner.map(lambda part: b"|1\r\n" + part * 3),
    ),
    max_leaves=12,
)


@given(messages=st.lists(MESSAGES, max_size=6), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_messages_are_split_alike_however_they_arrive(
    messages: list[bytes], sizes: list[int]
) -> None:
    framer, found = Framer(), []
    data, place, turn = b"".join(messages), 0, 0
    while place < len(data):
        size = sizes[turn % len(sizes)]
        found += framer.feed(data[place : place + size])
        place, turn = place + size, turn + 1
    assert found == messages
    assert framer.rest() == b""
