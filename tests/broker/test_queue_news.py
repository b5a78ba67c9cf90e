"""What Redis tells a watcher of a model's lists, and how often."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import ConnectionError as NoConnection

from llorch_worker.broker import keys, queues, watch
from llorch_worker.broker.connection import connect, own_connection
from llorch_worker.broker.queue_news import QueueNews
from tests.broker.jobs import look, push
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.messages import QUEUE
from tests.services import RedisServer, wait_until

GET_S = 60
BELL = keys.bell(QUEUE)
OWN_QUEUE = queues.worker_queue("toy", "gpu0@host")
LISTS = {*queues.watched("toy")}


@pytest.fixture
def news(store: redis.Redis) -> Iterator[QueueNews]:
    with own_connection(store) as asking, own_connection(store) as hearing:
        yield QueueNews(asking, hearing, "toy")


def told(store: redis.Redis, news: QueueNews) -> set[str]:
    """All that Redis has told by now, but for the change that ends it."""
    end = f"{queues.normal_queue('toy')}{queues.WORKER_MARK}end"
    store.set(end, 1)
    found: set[str] = set()
    while end not in found:
        found |= news.read(GET_S)
    return found - {end}


@pytest.mark.parametrize("name", sorted(LISTS))
def test_it_hears_of_each_list_for_all_workers(
    store: redis.Redis, news: QueueNews, name: str
) -> None:
    store.set(name, 1)
    assert told(store, news) == {name}


def test_redis_tells_of_a_list_once_until_somebody_looks(
    store: redis.Redis, news: QueueNews
) -> None:
    push(store, "a", "b")
    assert told(store, news) == {QUEUE}
    push(store, "c")
    look(store)
    assert told(store, news) == set()
    assert not news.any_exist([QUEUE])
    push(store, "d")
    assert told(store, news) == {QUEUE}
    assert news.any_exist([QUEUE])
    look(store)
    assert told(store, news) == {QUEUE}


def test_it_hears_that_a_job_was_rung_for(store: redis.Redis, news: QueueNews) -> None:
    push(store, "a")
    store.lpush(BELL, 1)
    assert told(store, news) == {QUEUE, BELL}


def test_it_hears_of_each_change_of_a_worker_queue(store: redis.Redis, news: QueueNews) -> None:
    for _ in range(2):
        store.lpush(OWN_QUEUE, "a job")
        assert told(store, news) == {OWN_QUEUE}


def test_it_looks_at_everything_once_the_database_was_emptied(
    store: redis.Redis, news: QueueNews
) -> None:
    store.flushall()
    assert told(store, news) == LISTS
    watch.ring_for(store, queues.watched("toy"), news)
    push(store, "a")
    assert told(store, news) == {QUEUE}


def test_it_looks_again_at_lists_that_redis_cannot_track(
    store: redis.Redis, news: QueueNews
) -> None:
    """Redis tracks a limited number of keys for all its clients together."""
    store.config_set("tracking-table-max-keys", 1)
    try:
        # Redis forgets some at each turn, and tells of them.
        found: set[str] = set()
        wait_until(lambda: len(LISTS - found) <= 1 or bool(found.update(told(store, news))))
    finally:
        store.config_set("tracking-table-max-keys", 1_000_000)


def test_it_notices_that_the_connection_that_hears_is_dead(
    redis_server: RedisServer, store: redis.Redis
) -> None:
    """Nothing is sent on it, so a firewall may forget it. Redis tells nobody either."""
    with (
        FaultProxy(LOCALHOST, redis_server.port) as proxy,
        connect(proxy.url) as client,
        own_connection(store) as asking,
        own_connection(client) as hearing,
    ):
        news = QueueNews(asking, hearing, "toy")

        def renew() -> None:
            store.set(keys.watch("toy"), 1)
            news.note_renewal()

        for _ in range(2):
            renew()
            wait_until(lambda: not told(store, news) and not news.renewals)
        proxy.hold()
        renew()
        with pytest.raises(NoConnection):
            renew()


def test_it_notices_that_redis_closed_either_connection(store: redis.Redis) -> None:
    for closed in (0, 1):
        with own_connection(store) as asking, own_connection(store) as hearing:
            connections = (asking, hearing)
            ids = []
            for connection in connections:
                connection.send_command("CLIENT", "ID")
                ids.append(connection.read_response())
            news = QueueNews(asking, hearing, "toy")
            store.client_kill_filter(_id=ids[closed])
            with pytest.raises(NoConnection):
                wait_until(lambda: news.read(timeout_s=0.05))  # noqa: B023 - it is called at once
