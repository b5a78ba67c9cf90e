"""Every Redis there is: what a script may do differs between versions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import Client
from tests.broker.steps import announce
from tests.services import RedisServer, own_redis, redis_binaries


@pytest.fixture(scope="module", params=redis_binaries(), ids=str)
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """As everywhere, but one module's tests run against each redis-server that is installed."""
    with own_redis(binary=request.param) as server:
        yield server


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """An empty Redis."""
    with connect(redis_server.url) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory", 0)


@pytest.fixture
def producer(redis_server: RedisServer, store: redis.Redis) -> Iterator[Client]:
    """A client of an empty Redis that knows the model ``toy``, which nobody serves now."""
    announce(store)
    with Client(redis_server.url, model="toy") as client:
        yield client
