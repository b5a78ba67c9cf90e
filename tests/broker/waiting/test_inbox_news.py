"""What Redis tells a watcher of a model's inbox, and how often."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import ConnectionError as NoConnection

from llorch_worker.broker import keys, queues
from llorch_worker.broker.connections.connection import connect, own_connection
from llorch_worker.broker.waiting.inbox_news import InboxNews
from tests.broker.steps import look, push
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.messages import QUEUE
from tests.services import RedisServer, wait_until

GET_S = 60
LISTS = queues.inbox_of("toy")


@pytest.fixture
def news(store: redis.Redis) -> Iterator[InboxNews]:
    with own_connection(store) as asking, own_connection(store) as hearing:
        yield InboxNews(asking, hearing, "toy")


def told(store: redis.Redis, news: InboxNews) -> bool:
    """Whether Redis has told of a change by now."""
    end = keys.watch("toy")
    news.renewals = 1
    store.set(end, 1)
    found = False
    while news.renewals:
        found |= bool(news.read(GET_S))
    return found


@pytest.mark.parametrize("name", LISTS)
def test_it_hears_of_each_list(store: redis.Redis, news: InboxNews, name: str) -> None:
    store.set(name, 1)
    assert told(store, news)


def test_redis_tells_of_a_list_once_until_somebody_looks(
    store: redis.Redis, news: InboxNews
) -> None:
    push(store, "a", "b")
    assert told(store, news)
    push(store, "c")
    look(store)
    assert not told(store, news)
    assert not news.is_filled()
    push(store, "d")
    assert told(store, news)
    assert news.is_filled()
    look(store)
    assert told(store, news)


def test_a_client_of_ours_is_no_news(store: redis.Redis, news: InboxNews) -> None:
    """It lets its jobs wait, and sends a wake-up, in one step."""
    store.zadd(keys.waiting("toy"), {"a": 1})
    store.lpush(keys.wake(QUEUE), 1)
    assert not told(store, news)
    assert news.has_work()


def test_it_asks_for_work_only_after_a_change(store: redis.Redis, news: InboxNews) -> None:
    assert not news.has_work()
    store.config_resetstat()
    assert not news.has_work()
    assert "cmdstat_exists" not in store.info("commandstats")
    for key in (keys.waiting("toy"), keys.scheduled("toy"), keys.DEADLINES):
        store.zadd(key, {"a": 1})
        assert not told(store, news)
        assert news.has_work()
        store.delete(key)
        assert not told(store, news)
        assert not news.has_work()


def test_it_looks_once_the_database_was_emptied(store: redis.Redis, news: InboxNews) -> None:
    store.flushall()
    assert told(store, news)
    assert not news.is_filled()
    push(store, "a")
    assert told(store, news)


def test_it_looks_again_at_lists_that_redis_cannot_track(
    store: redis.Redis, news: InboxNews
) -> None:
    """Redis tracks a limited number of keys for all its clients together."""
    store.config_set("tracking-table-max-keys", 1)
    try:
        # Redis forgets some at each cycle, and tells of them.
        wait_until(lambda: told(store, news))
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
        news = InboxNews(asking, hearing, "toy")

        def renew() -> None:
            store.set(keys.watch("toy"), 1)
            news.note_renewal()

        for _ in range(2):
            renew()
            wait_until(lambda: not news.read(0.05) and not news.renewals)
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
            news = InboxNews(asking, hearing, "toy")
            store.client_kill_filter(_id=ids[closed])
            with pytest.raises(NoConnection):
                wait_until(lambda: news.read(timeout_s=0.05))  # noqa: B023 - it is called at once
