"""A worker's wait for a bell."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.waiting.doorbell import Doorbell
from tests.broker.test_maxmemory import fill
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.messages import QUEUE
from tests.services import RedisServer, wait_until

WAIT_S = 60.0
BELLS = [keys.bell(f"{QUEUE}:high"), keys.bell(QUEUE)]


@pytest.fixture
def doorbell(store: redis.Redis) -> Iterator[Doorbell]:
    found = Doorbell(store)
    yield found
    found.close()


def blocked(store: redis.Redis) -> int:
    return int(store.info("clients")["blocked_clients"])


def test_a_wait_ends_although_its_command_arrives_late(
    redis_server: RedisServer, store: redis.Redis
) -> None:
    """Its packet may get lost, and is sent again later."""
    with FaultProxy(LOCALHOST, redis_server.port) as proxy, connect(proxy.url) as client:
        doorbell = Doorbell(client)
        doorbell.wait(BELLS, WAIT_S)
        assert not doorbell.leave()
        proxy.hold()
        doorbell.wait(BELLS, WAIT_S)
        # The command that ends it goes another way.
        doorbell._client = store
        healing = threading.Timer(0.1, proxy.heal)
        healing.start()
        assert not doorbell.leave()
        assert (blocked(store), store.keys("llorch:bell:*")) == (0, [])
        healing.join()
        doorbell._client = client
        doorbell.close()


def test_a_bell_that_rings_as_the_wait_ends_is_heard(
    store: redis.Redis, doorbell: Doorbell
) -> None:
    doorbell.wait(BELLS, WAIT_S)
    wait_until(lambda: blocked(store) == 1)
    store.lpush(BELLS[1], 1)
    assert doorbell.leave()
    assert store.keys("llorch:bell:*") == []
    assert not doorbell.leave(), "it is heard once"


def test_a_wait_ends_although_redis_takes_no_writes(store: redis.Redis, doorbell: Doorbell) -> None:
    doorbell.wait(BELLS, WAIT_S)
    sent_by = doorbell.fileno()
    fill(store)
    assert not doorbell.leave()
    assert (blocked(store), store.keys("llorch:bell:*")) == (0, [])
    doorbell.wait(BELLS, WAIT_S)
    assert doorbell.fileno() == sent_by, "the connection is kept"


def test_a_wait_ends_without_the_right_to_end_it(
    redis_server: RedisServer, store: redis.Redis
) -> None:
    """A file of users may be older than the worker."""
    rights = ("on", "nopass", "~*", "&*", "+@all", "-client", "+client|id")
    store.execute_command("ACL", "SETUSER", "old", *rights)
    with redis.Redis(host=LOCALHOST, port=redis_server.port, username="old") as client:
        doorbell = Doorbell(client)
        doorbell.wait(BELLS, WAIT_S)
        wait_until(lambda: blocked(store) == 1)
        assert doorbell.leave(), "a bell may have rung"
        wait_until(lambda: blocked(store) == 0)
        doorbell.wait(BELLS, WAIT_S)
        store.lpush(BELLS[0], 1)
        assert doorbell.has_answer(WAIT_S)
        assert doorbell.read()
        doorbell.close()
    store.execute_command("ACL", "DELUSER", "old")
