"""What goes on while no worker lives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llorch_worker.broker import keys
from llorch_worker.client import Client
from tests.broker.steps import announce, load, push, take
from tests.gateways import running_gateway
from tests.services import RedisServer
from tests.telemetry.exporters import running_exporter
from tests.waiting import wait_until


@pytest.mark.parametrize("lives", [running_gateway, running_exporter])
def test_a_scheduled_job_that_is_due_waits_and_asks_for_a_worker(
    lives: type[AbstractContextManager[object]],
    own_server: RedisServer,
    own_client: Client,
    tmp_path: Path,
) -> None:
    store = own_client.redis
    announce(store)
    push(store, "due", "later", eta=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    assert take(store) == []
    assert (load(store).work, load(store).scheduled) == (0, 2)
    # As if the hour had passed, of which the last worker has not lived to see the end.
    store.zadd(keys.scheduled("toy"), {"due": store.time()[0] * 1e3})
    with lives(own_server.url, tmp_path):
        wait_until(lambda: load(store).work == 1, what="the due job")
    assert load(store).scheduled == 1
    assert store.zrange(keys.waiting("toy"), 0, -1) == ["due"]
