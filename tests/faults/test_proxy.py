"""The proxy does exactly what it is told: what passes, what is late, what is lost."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from tests.faults.connection import Direction
from tests.faults.proxy import FaultProxy, contains
from tests.faults.resp import Framer, NotRedis, command_name
from tests.services import RedisServer, own_redis, wait_until

SHORT_S = 0.2
LONG_S = 10.0
SCRIPT = "redis.call('SET', KEYS[1], ARGV[1]) return ARGV[1]"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with own_redis() as running:
        yield running


@pytest.fixture
def direct(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def proxy(server: RedisServer, direct: redis.Redis) -> Iterator[FaultProxy]:
    assert direct.dbsize() == 0
    with FaultProxy("127.0.0.1", server.port) as running:
        yield running


def through(proxy: FaultProxy, timeout_s: float = LONG_S, protocol: int = 2) -> redis.Redis:
    """A client that tries once and gives up after ``timeout_s``."""
    return redis.Redis.from_url(
        proxy.url,
        socket_timeout=timeout_s,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
        protocol=protocol,
    )


def later(work: object) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


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


def test_a_delay_postpones_each_way_and_keeps_the_order(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    with through(proxy) as client:
        client.ping()
        proxy.delay(SHORT_S)
        began_s = time.monotonic()
        pipe = client.pipeline(transaction=False)
        for number in range(20):
            pipe.rpush("list", number)
        pipe.execute()
        # A lower bound only: the sum of both ways, once for the whole pipeline.
        assert time.monotonic() - began_s >= 2 * SHORT_S
        assert direct.lrange("list", 0, -1) == [str(number) for number in range(20)]


def test_held_bytes_arrive_late_even_from_a_client_that_is_gone(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    with through(proxy, SHORT_S) as client:
        client.ping()
        proxy.hold(Direction.REQUESTS)
        with pytest.raises(TimeoutError):
            client.set("late", "1")
    assert direct.get("late") is None
    assert proxy.open_connections == 1, "Redis has not heard that the client went away"
    proxy.heal()
    assert wait_until(lambda: direct.get("late")) == "1"
    wait_until(lambda: proxy.open_connections == 0)


def test_a_held_reply_is_of_a_request_that_was_carried_out(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    with through(proxy) as client:
        client.ping()
        proxy.hold(Direction.REPLIES)
        replies: list[object] = []
        waiting = later(lambda: replies.append(client.incr("count")))
        wait_until(lambda: direct.get("count") == "1")
        assert not replies
        proxy.heal()
        waiting.join(LONG_S)
        assert replies == [1]


def test_a_blackhole_swallows_and_resets_when_it_heals(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    with through(proxy) as client, through(proxy) as idle:
        client.ping()
        idle.ping()
        proxy.blackhole()
        failures: list[BaseException] = []

        def write() -> None:
            try:
                client.set("swallowed", "1")
            except ConnectionError as error:
                failures.append(error)

        writing = later(write)
        with through(proxy, SHORT_S) as newcomer, pytest.raises(TimeoutError):
            newcomer.ping()
        assert writing.is_alive()
        proxy.heal()
        writing.join(LONG_S)
        assert len(failures) == 1
        assert direct.get("swallowed") is None
        before = proxy.accepted_total
        assert idle.ping()
        assert proxy.accepted_total == before, "a connection that lost nothing lives on"


def test_a_reset_ends_every_connection_with_rst_and_takes_new_ones(proxy: FaultProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), LONG_S) as raw:
        raw.sendall(b"PING\r\n")
        assert raw.recv(100) == b"+PONG\r\n"
        proxy.reset()
        assert proxy.open_connections == 0
        with pytest.raises(ConnectionResetError):
            raw.recv(100)
    with through(proxy) as client:
        assert client.ping()


def test_a_reset_does_not_wait_for_clients_that_come_back(proxy: FaultProxy) -> None:
    over = threading.Event()

    def come_back() -> None:
        while not over.is_set():
            with (
                contextlib.suppress(ConnectionResetError),
                socket.create_connection(("127.0.0.1", proxy.port), LONG_S) as raw,
            ):
                raw.sendall(b"PING\r\n")
                raw.recv(100)

    comers = [later(come_back) for _ in range(3)]
    for _ in range(20):
        proxy.reset()
    over.set()
    for comer in comers:
        comer.join(LONG_S)
    assert proxy.accepted_total > 0


def test_a_reset_wakes_a_blocking_pop(proxy: FaultProxy, direct: redis.Redis) -> None:
    with through(proxy) as client:
        failures: list[BaseException] = []

        def pop() -> None:
            try:
                client.brpop(["empty"])
            except ConnectionError as error:
                failures.append(error)

        popping = later(pop)
        wait_until(lambda: "brpop" in [each["cmd"] for each in direct.client_list()])
        proxy.reset()
        popping.join(LONG_S)
        assert len(failures) == 1
        wait_until(lambda: "brpop" not in [each["cmd"] for each in direct.client_list()])


def test_refusing_spares_what_is_open_and_isolating_does_not(proxy: FaultProxy) -> None:
    with through(proxy) as client:
        client.ping()
        proxy.refuse()
        assert client.ping()
        with through(proxy) as newcomer:
            with pytest.raises(ConnectionError):
                newcomer.ping()
            proxy.isolate()
            for one in (client, newcomer):
                with pytest.raises(ConnectionError):
                    one.ping()
            proxy.heal()
            assert client.ping()
            assert newcomer.ping()


def test_the_reply_of_a_script_is_lost_after_the_script_ran(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    sha = hashlib.sha1(SCRIPT.encode()).hexdigest()
    with through(proxy) as client:
        script = client.register_script(SCRIPT)
        trap = proxy.lose_reply(contains("EVALSHA", sha))
        pipe = client.pipeline(transaction=False)
        pipe.set("before", "1")
        script(keys=["by script"], args=["7"], client=pipe)
        pipe.set("after", "1")
        with pytest.raises(ConnectionError):
            pipe.execute()
        assert trap.wait(LONG_S)
        assert direct.get("before") == "1"
        assert direct.get("by script") == "7"
        assert script(keys=["again"], args=["8"]) == "8", "a trap springs once"


def test_noscript_does_not_spring_a_trap_for_the_script(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    direct.script_flush()
    with through(proxy) as client:
        trap = proxy.lose_reply(contains("EVALSHA"))
        with pytest.raises(ConnectionError):
            # redis-py sends EVALSHA, is told NOSCRIPT, loads the script and sends EVALSHA again.
            client.register_script(SCRIPT)(keys=["by script"], args=["7"])
        assert trap.wait(LONG_S)
        assert direct.get("by script") == "7"


def test_a_lost_request_never_reaches_redis(proxy: FaultProxy, direct: redis.Redis) -> None:
    with through(proxy) as client:
        trap = proxy.lose_request(contains("SET", "lost"))
        pipe = client.pipeline(transaction=False)
        pipe.set("kept", "1")
        pipe.set("lost", "1")
        pipe.set("behind", "1")
        with pytest.raises(ConnectionError):
            pipe.execute()
        assert trap.wait(LONG_S)
        wait_until(lambda: direct.get("kept"))
        assert direct.mget("lost", "behind") == [None, None]


def test_a_frozen_connection_stays_silent_while_others_go_on(
    proxy: FaultProxy, direct: redis.Redis
) -> None:
    with through(proxy) as client, through(proxy) as neighbour:
        trap = proxy.lose_reply(contains("INCR"), freeze=True)
        failures: list[BaseException] = []

        def count() -> None:
            try:
                client.incr("count")
            except ConnectionError as error:
                failures.append(error)

        counting = later(count)
        assert trap.wait(LONG_S)
        assert counting.is_alive()
        assert direct.get("count") == "1"
        assert neighbour.incr("count") == 2
        proxy.heal()
        counting.join(LONG_S)
        assert len(failures) == 1


def test_a_trap_that_is_taken_back_does_not_spring(proxy: FaultProxy) -> None:
    with through(proxy) as client:
        trap = proxy.lose_reply(contains("PING"))
        proxy.disarm(trap)
        assert client.ping()
        assert not trap.sprung


def test_no_redis_behind_the_proxy_is_a_closed_connection(server: RedisServer) -> None:
    with (
        FaultProxy("127.0.0.1", 1) as proxy,
        through(proxy) as client,
        pytest.raises(ConnectionError),
    ):
        client.ping()


def test_a_stopped_proxy_leaves_no_thread_and_no_port(server: RedisServer) -> None:
    proxy = FaultProxy("127.0.0.1", server.port).start()
    with through(proxy) as client:
        client.ping()
        proxy.hold()
        proxy.stop()
        proxy.stop()
        with pytest.raises(ConnectionError):
            client.ping()
    assert not any(thread.name == "fault-proxy" and thread.is_alive() for thread in own(proxy))


def own(proxy: FaultProxy) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread is proxy._thread]


MESSAGES = st.recursive(
    st.one_of(
        st.sampled_from([b"+OK\r\n", b"-ERR no\r\n", b":-7\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n"]),
        st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"$0\r\n\r\n", b"*0\r\n", b"%0\r\n"]),
        st.binary(max_size=40).map(lambda data: b"$%d\r\n%s\r\n" % (len(data), data)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda parts: b"*%d\r\n%s" % (len(parts), b"".join(parts))),
        st.lists(st.tuples(inner, inner), max_size=3).map(
            lambda pairs: (
                b"%%%d\r\n%s" % (len(pairs), b"".join(part for pair in pairs for part in pair))
            )
        ),
        st.tuples(inner, inner, inner).map(lambda parts: b"|1\r\n" + b"".join(parts)),
    ),
    max_leaves=12,
)


@given(messages=st.lists(MESSAGES, max_size=6), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_messages_are_cut_alike_however_they_arrive(
    messages: list[bytes], sizes: list[int]
) -> None:
    framer, cut = Framer(), []
    data, place, turn = b"".join(messages), 0, 0
    while place < len(data):
        size = sizes[turn % len(sizes)]
        cut += framer.feed(data[place : place + size])
        place, turn = place + size, turn + 1
    assert cut == messages
    assert framer.rest() == b""


def test_inline_commands_are_messages_and_tls_is_none() -> None:
    assert Framer().feed(b"PING\r\n*1\r\n$4\r\nping\r\n") == [b"PING\r\n", b"*1\r\n$4\r\nping\r\n"]
    assert command_name(b"ping now\r\n") == command_name(b"*1\r\n$4\r\nping\r\n") == b"PING"
    framer = Framer()
    with pytest.raises(NotRedis):
        framer.feed(b"\x16\x03\x01\x02\x00")
    assert framer.rest() == b"\x16\x03\x01\x02\x00"
