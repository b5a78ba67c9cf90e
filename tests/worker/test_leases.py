"""What the lease keeper logs and does when Redis fails a part of its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.jobs import claims
from llorch_worker.settings import Settings
from llorch_worker.worker.leases import LeaseKeeper
from tests.broker.steps import push, take
from tests.services import RedisServer, wait_until
from tests.store import leases_in

NO_SWEEP = "cannot look for jobs of dead workers"
NO_RENEWAL = "cannot renew leases"


@contextmanager
def keeping(client: redis.Redis, *, lease_s: float = 0.2, sweep_s: float = 0.02) -> Iterator[None]:
    keeper = LeaseKeeper(
        client,
        Settings().model_copy(update={"lease_s": lease_s, "sweep_s": sweep_s}),
        on_lost=lambda _claim: None,
    )
    keeper.start()
    try:
        yield
    finally:
        keeper.close()


def said(caplog: pytest.LogCaptureFixture, sentence: str) -> int:
    return sum(message.startswith(sentence) for message in caplog.messages)


def test_a_sweep_that_redis_refuses_is_logged_once_and_is_not_an_outage(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with connect(own_server.url) as client:
        client.set(keys.LEASES, "no zset")
        with keeping(client):
            wait_until(lambda: said(caplog, NO_SWEEP))
            before = scripts_run(client)
            wait_until(lambda: scripts_run(client) > before + 20)
            client.delete(keys.LEASES)
            wait_until(lambda: said(caplog, "can look for jobs of dead workers again"))
    assert said(caplog, NO_SWEEP) == 1
    assert said(caplog, NO_RENEWAL) == said(caplog, "can renew leases again") == 0
    assert said(caplog, "Redis is away") == 0


def scripts_run(client: redis.Redis) -> int:
    """Of renewals and sweeps alike."""
    return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])


def test_an_unreachable_redis_is_an_outage(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with connect(own_server.url) as client, keeping(client):
        own_server.halt()
        wait_until(lambda: said(caplog, "Redis is away"))
        own_server.start()
        wait_until(lambda: said(caplog, "Redis serves again"))


@pytest.mark.parametrize("lease_s", [0.2, 3600.0])
def test_a_keeper_sweeps_at_its_start_if_redis_has_been_up_for_a_lease(
    own_server: RedisServer, lease_s: float
) -> None:
    with connect(own_server.url) as client:
        push(client, "a")
        (claim,) = take(client)
        claims.lapse(client, claim, max_attempts=3)
        wait_until(lambda: client.info("server")["uptime_in_seconds"] > 0.2)
        with keeping(client, lease_s=lease_s, sweep_s=3600.0):
            pass
        swept = not leases_in(client)
    assert swept == (lease_s == 0.2)


def test_one_keeper_sweeps_at_a_time(own_server: RedisServer) -> None:
    with connect(own_server.url) as client:
        push(client, "a")
        (claim,) = take(client)
        claims.lapse(client, claim, max_attempts=3)
        client.set(keys.SWEPT, 1)
        with keeping(client, lease_s=3600.0):
            # It sweeps as often as it renews.
            before = renewals(client)
            wait_until(lambda: renewals(client) > before + 10)
            assert len(leases_in(client)) == 1
            client.delete(keys.SWEPT)
            wait_until(lambda: not leases_in(client))


def test_a_sweep_before_redis_clock_was_set_back_keeps_nobody_from_sweeping(
    own_server: RedisServer,
) -> None:
    with connect(own_server.url) as client:
        push(client, "a")
        (claim,) = take(client)
        claims.lapse(client, claim, max_attempts=3)
        client.set(keys.SWEPT, 1, ex=3600)
        with keeping(client, lease_s=3600.0):
            wait_until(lambda: not leases_in(client))


def renewals(client: redis.Redis) -> int:
    """Of a keeper without claims: it asks whether there are leases."""
    return int(client.info("commandstats")["cmdstat_exists"]["calls"])
