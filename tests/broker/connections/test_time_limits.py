"""What listens at the URL's address is not the Redis that it names: one sentence, soon."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.exceptions import TimeoutError as NoReply

from llorch_worker.broker.connections import time_limits
from llorch_worker.broker.connections.connection import broker_errors, connect, connect_async
from llorch_worker.broker.connections.time_limits import LAST_TRY_S, Greetings
from llorch_worker.client import AsyncClient, Client
from llorch_worker.contract.errors import BrokerUnavailable
from tests.faults.test_urls import tls_options
from tests.listeners import http_port, silent_port
from tests.services import LOCALHOST, free_port, own_redis

SOON = "socket_connect_timeout=0.3"


def ask(url: str) -> None:
    with broker_errors(url), connect(url) as client:
        client.ping()


def ask_async(url: str) -> None:
    async def use() -> None:
        async with connect_async(url) as client:
            await client.ping()

    with broker_errors(url):
        asyncio.run(use())


def submit(url: str) -> None:
    with Client(url, model="toy") as client:
        client.submit(prompt="x")


def submit_async(url: str) -> None:
    async def use() -> None:
        async with AsyncClient(url, model="toy") as client:
            await client.submit(prompt="x")

    asyncio.run(use())


@pytest.fixture(params=[ask, ask_async, submit, submit_async])
def use(request: pytest.FixtureRequest) -> Callable[[str], None]:
    found: Callable[[str], None] = request.param
    return found


def sentence(use: Callable[[str], None], url: str) -> str:
    with pytest.raises(BrokerUnavailable) as caught:
        use(url)
    return str(caught.value)


def test_a_server_that_never_answers_is_asked_once(use: Callable[[str], None]) -> None:
    with silent_port() as (port, accepted):
        url = f"redis://{LOCALHOST}:{port}/0"
        told = f"No Redis at {url}: it accepts connections and never answers; "
        # Something is there already, so it does not advise to start one.
        told += "correct the URL that the call or --redis gives"
        assert sentence(use, f"{url}?{SOON}") == told
        # For the command, and to see whether it speaks at all.
        assert len(accepted()) == 2


def test_an_http_server_is_named(use: Callable[[str], None]) -> None:
    with http_port() as port:
        said = sentence(use, f"redis://{LOCALHOST}:{port}/0?{SOON}")
    assert "an HTTP server answers there" in said


def test_tls_at_a_plain_redis_is_named(use: Callable[[str], None]) -> None:
    with own_redis() as server:
        said = sentence(use, f"rediss://{LOCALHOST}:{server.port}/0?{SOON}")
    assert "it answers without TLS, so use redis://" in said


def test_a_plain_url_at_a_redis_with_tls_is_named(
    use: Callable[[str], None], tmp_path: Path
) -> None:
    tls, port = tls_options(tmp_path), free_port()
    with own_redis(binary=tls.binary, options=tls.at(port)):
        said = sentence(use, f"redis://{LOCALHOST}:{port}/0?{SOON}")
    assert "it answers with TLS only, so use rediss://" in said


def test_a_silent_unix_socket_is_named(tmp_path: Path) -> None:
    path = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(BrokerUnavailable, match="accepts connections and never answers"):
            ask(f"unix://{path}")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are given up a tenth as soon."""
    monkeypatch.setattr(time_limits, "LAST_TRY_S", LAST_TRY_S / 10)


@pytest.mark.usefixtures("hurried")
def test_a_redis_that_has_answered_and_stops_is_given_up(use: Callable[[str], None]) -> None:
    with own_redis() as server:
        url = f"{server.url}?socket_connect_timeout=0.7&socket_timeout=2"
        with connect(url) as client:
            client.ping()
        with server.paused(), connect(url) as client, pytest.raises(NoReply):
            client.ping()
        with server.paused():
            assert "Timeout" in sentence(use, url)


@pytest.mark.parametrize("connected", [True, False])
def test_no_cancellation_is_lost_wherever_a_command_is(connected: bool) -> None:
    async def use() -> None:
        async with connect_async(server.url) as client:
            for laps in range(60):
                if connected:
                    await client.ping()
                else:
                    await client.connection_pool.disconnect()
                waits = asyncio.create_task(client.blpop(["none"], 0))
                for _ in range(laps):
                    await asyncio.sleep(0)
                waits.cancel()
                await asyncio.wait([waits], timeout=5)
                assert waits.cancelled()

    with own_redis() as server:
        asyncio.run(use())


def test_a_connection_that_waits_long_for_its_greeting_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "CONNECTING_AT_ONCE", 2)
    monkeypatch.setattr(time_limits, "LOOK_UP_S", 0.01)
    served: list[str] = []

    async def connect_as(name: str, greetings: Greetings) -> None:
        async with greetings.take():
            served.append(name)

    async def use() -> None:
        greetings, over = Greetings(), asyncio.Event()

        async def hold() -> None:
            async with greetings.take():
                await over.wait()

        holders = [asyncio.create_task(hold()) for _ in range(2)]
        first = asyncio.create_task(connect_as("first", greetings))
        # Many looks, in which it must not leave its place.
        await asyncio.sleep(0.2)
        second = asyncio.create_task(connect_as("second", greetings))
        await asyncio.sleep(0.015)
        over.set()
        await asyncio.gather(*holders, first, second)

    asyncio.run(use())
    assert served == ["first", "second"]


def test_who_gives_up_waiting_for_a_greeting_leaves_it_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "CONNECTING_AT_ONCE", 1)
    monkeypatch.setattr(time_limits, "LOOK_UP_S", 0.01)
    monkeypatch.setattr(time_limits, "CONNECT_TIMEOUT_S", 0.05)

    async def use() -> None:
        greetings = Greetings()
        async with greetings.take():
            with pytest.raises(NoReply):
                await greetings.take().__aenter__()
            gone = asyncio.create_task(greetings.take().__aenter__())
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.wait({gone})
        async with greetings.take():
            pass

    asyncio.run(use())
