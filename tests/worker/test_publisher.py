"""The publisher against a real Redis that goes away and comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect
from llorch_worker.contract import CancelledEvent, Event, Tokens, decode_event
from llorch_worker.worker.publisher import Publisher
from tests.faults.proxy import LOCALHOST, FaultProxy, contains
from tests.services import RedisServer, own_redis, wait_until

FLUSH_S = 10.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with own_redis(append_only=True) as server:
        yield server


@pytest.fixture
def store(server: RedisServer) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        yield client


@pytest.fixture
def publisher(store: redis.Redis) -> Iterator[Publisher]:
    publisher = Publisher(store, flush_interval_ms=5, stream_ttl_s=60)
    publisher.start()
    yield publisher
    publisher.close(timeout_s=2)


def token(index: int) -> Tokens:
    return Tokens(index=index, ids=(index,), text=f"{index} ")


def read(store: redis.Redis, job_id: str) -> list[Event]:
    return [decode_event(fields["event"]) for _, fields in store.xrange(keys.events(job_id))]


def ids_of(events: list[Event]) -> list[int]:
    return [i for event in events if isinstance(event, Tokens) for i in event.ids]


def test_events_arrive_once_in_order_and_the_stream_expires(
    publisher: Publisher, store: redis.Redis
) -> None:
    for index in range(200):
        publisher.append("a", token(index))
    publisher.append("a", CancelledEvent())
    assert publisher.flush("a", FLUSH_S)
    events = read(store, "a")
    assert ids_of(events) == list(range(200))
    assert isinstance(events[-1], CancelledEvent)
    assert len(events) < 100, "tokens are written in batches"
    assert 0 < store.ttl(keys.events("a")) <= 60


def test_a_redis_restart_loses_and_doubles_nothing(
    publisher: Publisher, store: redis.Redis, server: RedisServer
) -> None:
    for index in range(50):
        publisher.append("a", token(index))
    wait_until(lambda: read(store, "a"))
    server.halt()
    for index in range(50, 500):
        publisher.append("a", token(index))
    assert not publisher.flush("a", 0.05)
    server.start()
    publisher.append("a", CancelledEvent())
    assert publisher.flush("a", FLUSH_S)
    assert ids_of(read(store, "a")) == list(range(500))


def test_a_write_whose_answer_was_lost_is_not_doubled(
    server: RedisServer, store: redis.Redis
) -> None:
    with FaultProxy(LOCALHOST, server.port) as proxy, connect(proxy.url) as client:
        publisher = Publisher(client, flush_interval_ms=5, stream_ttl_s=60)
        publisher.start()
        for index in range(9):
            trap = proxy.lose_reply(contains("XADD"))
            publisher.append("a", token(index))
            assert publisher.flush("a", FLUSH_S)
            assert trap.sprung
        publisher.close(timeout_s=5)
    assert ids_of(read(store, "a")) == list(range(9))


def test_a_redelivered_job_goes_on_where_its_stream_ends(
    publisher: Publisher, store: redis.Redis
) -> None:
    store.xadd(keys.events("a"), {"event": token(0).model_dump_json()}, id="7-0")
    publisher.append("a", CancelledEvent())
    assert publisher.flush("a", FLUSH_S)
    assert [entry_id for entry_id, _ in store.xrange(keys.events("a"))] == ["7-0", "8-0"]


def test_a_stream_key_of_another_type_harms_no_other_job(
    publisher: Publisher, store: redis.Redis
) -> None:
    store.set(keys.events("bad"), "something else")
    publisher.append("bad", token(0))
    publisher.append("good", CancelledEvent())
    assert publisher.flush("good", FLUSH_S)
    assert publisher.flush("bad", FLUSH_S)


def test_closing_writes_what_is_left(store: redis.Redis) -> None:
    publisher = Publisher(store, flush_interval_ms=50, stream_ttl_s=60)
    publisher.start()
    for index in range(10):
        publisher.append("a", token(index))
    publisher.close(timeout_s=5)
    assert ids_of(read(store, "a")) == list(range(10))
