"""Nodes of a Cluster that accept connections and never answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from redis.exceptions import ConnectionError as NoConnection

from llorch_worker.broker.connection import connect, connect_async, connect_impatient
from tests.redis_cluster import one_node
from tests.services import LOCALHOST, RedisServer, free_node_port


@pytest.fixture
def silent() -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server((LOCALHOST, 0))) for _ in range(4)]
        for each in found:
            each.setblocking(False)
        yield found


@pytest.fixture(scope="module")
def node() -> Iterator[RedisServer]:
    with one_node(port=free_node_port()) as server:
        yield server


@pytest.fixture
def url(silent: list[socket.socket], node: RedisServer) -> str:
    """Names the silent nodes first."""
    ports = [*(each.getsockname()[1] for each in silent), node.port]
    return ";".join(f"redis+cluster://{LOCALHOST}:{port}" for port in ports)


def asked(silent: list[socket.socket]) -> int:
    """How many connections they got since the last call."""
    return sum(accepts(each) for each in silent)


def accepts(server: socket.socket) -> int:
    connections = 0
    while True:
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return connections
        connections += 1


def write(url: str) -> None:
    with connect_impatient(url) as client:
        client.set("a", 1)


def write_patiently(url: str) -> None:
    with connect(url) as client:
        client.set("a", 1)


def write_async(url: str) -> None:
    async def use() -> None:
        async with connect_async(url) as client:
            await client.set("a", 1)

    asyncio.run(use())


def test_a_question_asks_two_silent_nodes_and_the_next_one_goes_on_from_there(
    url: str, silent: list[socket.socket]
) -> None:
    for _ in range(2):
        with pytest.raises(NoConnection, match="no node tells"):
            write(url)
        assert 0 < asked(silent) <= 2
    write(url)


@pytest.mark.parametrize("use", [write_patiently, write_async])
def test_another_client_of_the_process_begins_with_the_node_that_told(
    url: str, silent: list[socket.socket], use: Callable[[str], None]
) -> None:
    use(url)
    assert asked(silent) > 0
    use(url)
    assert asked(silent) == 0
