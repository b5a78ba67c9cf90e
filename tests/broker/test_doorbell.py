"""A worker's look and the wait after it, in one packet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from llorch_worker.broker import claims, keys, queues, scripts, watch
from llorch_worker.broker.claims import Taken
from llorch_worker.broker.connection import connect, own_connection
from llorch_worker.broker.doorbell import Doorbell
from tests.broker.jobs import TERMS, push
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.messages import QUEUE
from tests.services import RedisServer, wait_until

WAIT_S = 60.0
BELLS = [keys.bell(f"{QUEUE}:high"), keys.bell(QUEUE)]

Look = Callable[[], Taken]


@pytest.fixture
def connection(store: redis.Redis) -> Iterator[Any]:
    with own_connection(store) as found:
        yield found


@pytest.fixture
def doorbell() -> Doorbell:
    return Doorbell()


@pytest.fixture
def look(store: redis.Redis, connection: Any, doorbell: Doorbell) -> Look:
    """Claims a job at most, and waits."""
    connection.connect()
    scripts.load(store, "claim")

    def claim() -> Taken:
        return claims.claim(
            store, consumed=queues.queues("toy"), held=(), limit=1, worker="w@h", terms=TERMS,
            run=partial(doorbell.run_and_wait, connection, BELLS, WAIT_S),
        )  # fmt: skip

    return claim


def ids(taken: Taken) -> Sequence[str]:
    return [claim.job_id for claim in taken.claims]


def blocked(store: redis.Redis) -> int:
    return int(store.info("clients")["blocked_clients"])


def test_jobs_are_claimed_at_once_and_the_next_ring_is_heard(
    store: redis.Redis, connection: Any, doorbell: Doorbell, look: Look
) -> None:
    push(store, "a")
    assert ids(look()) == ["a"]
    assert doorbell.waits(connection)
    assert not doorbell.is_rung(connection)
    push(store, "b")
    watch.ring_for_all(store, "toy")
    wait_until(lambda: doorbell.is_rung(connection))
    assert doorbell.read(connection)
    assert ids(look()) == ["b"]


def test_a_ring_that_comes_with_the_reply_to_a_claim_is_heard(
    store: redis.Redis, connection: Any, doorbell: Doorbell, look: Look
) -> None:
    push(store, "a", "b")
    # It leaves a job, and rings for whoever waits next: itself.
    assert ids(look()) == ["a"]
    wait_until(lambda: doorbell.is_rung(connection))
    assert doorbell.read(connection)
    assert doorbell.has_rung
    assert ids(look()) == ["b"]


def test_a_claim_is_made_once_if_redis_forgot_the_script(
    store: redis.Redis, connection: Any, doorbell: Doorbell, look: Look
) -> None:
    push(store, "a")
    look()
    assert not doorbell.leave(connection, store)
    store.script_flush()
    push(store, "b")
    watch.ring_for_all(store, "toy")
    assert ids(look()) == ["b"]
    assert not doorbell.waits(connection)
    assert blocked(store) == 0
    # The wait took the ring before the job was claimed.
    assert doorbell.has_rung


def test_a_ring_is_kept_for_the_next_look_if_redis_forgot_the_script(
    store: redis.Redis, doorbell: Doorbell, look: Look
) -> None:
    store.script_flush()
    store.lpush(BELLS[1], 1)
    look()
    assert doorbell.has_rung


def test_a_wait_ends_although_its_command_arrives_late(
    redis_server: RedisServer,
    store: redis.Redis,
    doorbell: Doorbell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a packet may get lost, and is sent again after the claim was answered."""
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


def test_a_claim_that_is_refused_does_not_wait(
    store: redis.Redis, connection: Any, doorbell: Doorbell, look: Look
) -> None:
    store.config_set("min-replicas-to-write", 1)
    for _ in range(2):
        with pytest.raises(ResponseError):
            look()
        assert not doorbell.waits(connection)
        assert blocked(store) == 0
    store.config_set("min-replicas-to-write", 0)
    push(store, "a")
    assert ids(look()) == ["a"]
    assert doorbell.waits(connection)
