"""Every Redis there is: what a script may do differs between versions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services import RedisServer, own_redis, redis_binaries


@pytest.fixture(scope="module", params=redis_binaries(), ids=str)
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """As everywhere, but one module's tests run against each redis-server that is installed."""
    with own_redis(binary=request.param) as server:
        yield server
