"""A worker's wait for a bell."""

from __future__ import annotations

import threading

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect, own_connection
from llorch_worker.broker.doorbell import Doorbell
from tests.broker.test_maxmemory import fill
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.messages import QUEUE
from tests.services import RedisServer, wait_until

WAIT_S = 60.0
BELLS = [keys.bell(f"{QUEUE}:high"), keys.bell(QUEUE)]


@pytest.fixture
def doorbell() -> Doorbell:
    return Doorbell()


def blocked(store: redis.Redis) -> int:
    return int(store.info("clients")["blocked_clients"])


def test_a_wait_ends_although_its_command_arrives_late(
    redis_server: RedisServer, store: redis.Redis, doorbell: Doorbell
) -> None:
    """Its packet may get lost, and is sent again later."""
    with (
        FaultProxy(LOCALHOST, redis_server.port) as proxy,
        connect(proxy.url) as client,
        own_connection(client) as connection,
    ):
        doorbell.wait(connection, BELLS, WAIT_S)
        assert not doorbell.leave(connection, store)
        proxy.hold()
        doorbell.wait(connection, BELLS, WAIT_S)
        healing = threading.Timer(0.1, proxy.heal)
        healing.start()
        assert not doorbell.leave(connection, store)
        assert (blocked(store), store.keys("llorch:bell:*")) == (0, [])
        healing.join()


def test_a_bell_that_rings_as_the_wait_ends_is_heard(
    store: redis.Redis, doorbell: Doorbell
) -> None:
    with own_connection(store) as connection:
        doorbell.wait(connection, BELLS, WAIT_S)
        wait_until(lambda: blocked(store) == 1)
        store.lpush(BELLS[1], 1)
        assert doorbell.leave(connection, store)
        assert store.keys("llorch:bell:*") == []


def test_a_wait_ends_although_redis_takes_no_writes(store: redis.Redis, doorbell: Doorbell) -> None:
    with own_connection(store) as connection:
        doorbell.wait(connection, BELLS, WAIT_S)
        fill(store)
        assert not doorbell.leave(connection, store)
        assert (blocked(store), store.keys("llorch:bell:*")) == (0, [])
        assert connection.is_connected
