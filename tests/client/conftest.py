from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services import RedisServer, own_redis


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis that nobody else is connected to."""
    with own_redis() as server:
        yield server
