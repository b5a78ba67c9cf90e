"""A worker's wait for a bell."""

from __future__ import annotations

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect, own_connection
from llorch_worker.broker.doorbell import Doorbell
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
    redis_server: RedisServer,
    store: redis.Redis,
    doorbell: Doorbell,
    monkeypatch: pytest.MonkeyPatch,
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
        unblocked = []

        def unblock(client_id: int) -> bool:
            unblocked.append(redis.Redis.client_unblock(store, client_id))
            proxy.heal()
            return unblocked[-1]

        monkeypatch.setattr(store, "client_unblock", unblock)
        assert not doorbell.leave(connection, store)
        assert (unblocked[0], blocked(store)) == (False, 0)


def test_a_wait_ends_although_the_user_may_not_learn_its_id(
    redis_server: RedisServer, store: redis.Redis, doorbell: Doorbell
) -> None:
    rights = ("on", ">secret", "allkeys", "allchannels", "+@all", "-client", "+client|unblock")
    store.execute_command("ACL", "SETUSER", "unknown", "reset", *rights)
    url = redis_server.url.replace("//", "//unknown:secret@")
    with connect(url) as client, own_connection(client) as connection:
        doorbell.wait(connection, BELLS, WAIT_S)
        assert doorbell.leave(connection, client), "it may have been told of a ring"
        assert not doorbell.waits(connection)
        wait_until(lambda: blocked(store) == 0)
    store.execute_command("ACL", "DELUSER", "unknown")
