"""A worker's wait for a wake-up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.waiting.wake_ups import WakeUps
from tests.broker.test_maxmemory import fill
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.messages import QUEUE
from tests.services import RedisServer, wait_until

WAIT_S = 60.0
WAKE_KEYS = [keys.wake(f"{QUEUE}:high"), keys.wake(QUEUE)]


@pytest.fixture
def wake_ups(store: redis.Redis) -> Iterator[WakeUps]:
    found = WakeUps(store)
    yield found
    found.close()


def blocked(store: redis.Redis) -> int:
    return int(store.info("clients")["blocked_clients"])


def test_a_wait_ends_although_its_command_arrives_late(
    redis_server: RedisServer, store: redis.Redis
) -> None:
    """Its packet may get lost, and is sent again later."""
    with FaultProxy(LOCALHOST, redis_server.port) as proxy, connect(proxy.url) as client:
        wake_ups = WakeUps(client)
        wake_ups.wait(WAKE_KEYS, WAIT_S)
        assert not wake_ups.leave()
        proxy.hold()
        wake_ups.wait(WAKE_KEYS, WAIT_S)
        # The command that ends it goes another way.
        wake_ups._client = store
        healing = threading.Timer(0.1, proxy.heal)
        healing.start()
        assert not wake_ups.leave()
        assert (blocked(store), store.keys("llorch:wake:*")) == (0, [])
        healing.join()
        wake_ups._client = client
        wake_ups.close()


def test_a_wake_up_that_comes_as_the_wait_ends_is_heard(
    store: redis.Redis, wake_ups: WakeUps
) -> None:
    wake_ups.wait(WAKE_KEYS, WAIT_S)
    wait_until(lambda: blocked(store) == 1)
    store.lpush(WAKE_KEYS[1], 1)
    assert wake_ups.leave()
    assert store.keys("llorch:wake:*") == []
    assert not wake_ups.leave(), "it is heard once"


def test_a_wait_ends_although_redis_takes_no_writes(store: redis.Redis, wake_ups: WakeUps) -> None:
    wake_ups.wait(WAKE_KEYS, WAIT_S)
    sent_by = wake_ups.fileno()
    fill(store)
    assert not wake_ups.leave()
    assert (blocked(store), store.keys("llorch:wake:*")) == (0, [])
    wake_ups.wait(WAKE_KEYS, WAIT_S)
    assert wake_ups.fileno() == sent_by, "the connection is kept"


def test_a_wait_ends_without_the_right_to_end_it(
    redis_server: RedisServer, store: redis.Redis
) -> None:
    """A file of users may be older than the worker."""
    rights = ("on", "nopass", "~*", "&*", "+@all", "-client", "+client|id")
    store.execute_command("ACL", "SETUSER", "old", *rights)
    with redis.Redis(host=LOCALHOST, port=redis_server.port, username="old") as client:
        wake_ups = WakeUps(client)
        wake_ups.wait(WAKE_KEYS, WAIT_S)
        wait_until(lambda: blocked(store) == 1)
        assert wake_ups.leave(), "a wake-up may have come"
        wait_until(lambda: blocked(store) == 0)
        wake_ups.wait(WAKE_KEYS, WAIT_S)
        store.lpush(WAKE_KEYS[0], 1)
        assert wake_ups.has_answer(WAIT_S)
        assert wake_ups.read()
        wake_ups.close()
    store.execute_command("ACL", "DELUSER", "old")
