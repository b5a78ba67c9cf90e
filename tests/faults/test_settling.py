"""Jobs that outlive their worker's connection, or what Redis knew of them, are settled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from kombu import Connection
from kombu import transport as kombu_transports

from llorch_worker.broker import queues, transport
from llorch_worker.broker.connection import connect
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.producer import connection_config
from tests.broker.jobs import TERMS, push, take
from tests.faults.sentinel import PASSWORD, sentinel
from tests.messages import QUEUE
from tests.services import LOCALHOST, own_redis, wait_until
from tests.store import leases_in

ENDS_ARE_KNOWN_S = TERMS.lease_ms / 1e3 + TERMS.result_ttl_s
"""How long after a renewal Redis certainly knows of an end by another worker."""


@pytest.fixture
def redis_url() -> Iterator[str]:
    with own_redis() as server:
        yield server.url


@pytest.fixture
def sentinel_url(tmp_path: Path) -> Iterator[str]:
    with (
        own_redis(options=("--requirepass", PASSWORD)) as master,
        sentinel(tmp_path, master) as port,
    ):
        url = f"sentinel://:{PASSWORD}@{LOCALHOST}:{port}/1?master_name=jobs"
        with connect(url) as client:
            wait_until(client.ping, what="the Sentinel to know its master")
        yield url


@pytest.fixture(params=["redis_url", "sentinel_url"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def claiming(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process' transports claim, as a worker's do."""
    monkeypatch.setattr(
        kombu_transports, "TRANSPORT_ALIASES", dict(kombu_transports.TRANSPORT_ALIASES)
    )
    monkeypatch.setattr(kombu_transports, "_transport_cache", {})
    for name in ("terms", "worker"):
        monkeypatch.setattr(transport.ClaimChannel, name, None, raising=False)
    transport.install(TERMS, "w@h")
    yield
    for claim in HELD_CLAIMS.all():
        HELD_CLAIMS.discard(claim)


def hand_back(channel: transport.ClaimChannel, client: redis.Redis) -> None:
    channel.qos.reject("a", requeue=True)
    assert [claim.job_id for claim in take(client)] == ["a"]


def end(channel: transport.ClaimChannel, client: redis.Redis) -> None:
    channel.qos.ack("a")
    assert take(client) == []


@pytest.mark.parametrize("settle", [hand_back, end])
@pytest.mark.usefixtures("claiming")
def test_a_job_that_outlives_its_connection_is_settled(
    url: str, settle: Callable[[transport.ClaimChannel, redis.Redis], None]
) -> None:
    config = connection_config(url)
    options = config["broker_transport_options"]
    with connect(url) as client:
        push(client, "a")
        with Connection(config["broker_url"], transport_options=options) as connection:
            channel = connection.default_channel
            channel.do_restore = False
            with channel.conn_or_acquire() as claiming_client:
                (claim,) = take(claiming_client)
            HELD_CLAIMS.add(claim)
            channel.delivered["a"] = claim
        assert len(leases_in(client)) == 1
        settle(channel, client)
        assert not channel.delivered


@pytest.mark.usefixtures("claiming")
def test_a_claim_after_one_that_was_refused_finds_all_jobs(redis_url: str) -> None:
    """Redis answered no claim, but the ring that told of jobs elsewhere is spent."""
    consumed = queues.queues("toy", "w@h")
    own_low = queues.Route(queues.worker_queue("toy", "w@h"), queues.LOW_STEP).list_key
    with connect(redis_url) as client, Connection(redis_url) as connection:
        channel = connection.default_channel
        channel.client.connection = channel.client.connection_pool.make_connection()
        push(client, "low")
        client.rename(QUEUE, own_low)
        push(client, "normal")
        client.config_set("min-replicas-to-write", 1)
        assert channel._claim(consumed, 2) is None
        client.config_set("min-replicas-to-write", 0)
        taken = channel._claim(consumed, 2)
        assert [claim.job_id for claim in taken.claims] == ["normal", "low"]


@pytest.mark.parametrize(
    ("taken_s_ago", "renewed_s_ago", "back"),
    [
        pytest.param(0, None, True, id="just taken"),
        pytest.param(ENDS_ARE_KNOWN_S - 10, None, True, id="never renewed"),
        pytest.param(ENDS_ARE_KNOWN_S + 1, None, False, id="never renewed for too long"),
        pytest.param(10 * ENDS_ARE_KNOWN_S, 10, True, id="renewed"),
        pytest.param(10 * ENDS_ARE_KNOWN_S, ENDS_ARE_KNOWN_S + 1, False, id="not for too long"),
    ],
)
@pytest.mark.usefixtures("claiming")
def test_a_job_that_redis_lost_goes_back_only_if_no_end_of_it_can_have_expired(
    redis_url: str, taken_s_ago: float, renewed_s_ago: float | None, back: bool
) -> None:
    now_s = time.monotonic()
    with connect(redis_url) as client, Connection(redis_url) as connection:
        push(client, "a")
        channel = connection.default_channel
        (taken,) = take(client)
        claim = replace(taken, taken_s=now_s - taken_s_ago)
        HELD_CLAIMS.add(claim)
        if renewed_s_ago is not None:
            HELD_CLAIMS.note_renewed([claim], now_s - renewed_s_ago)
        channel.delivered["a"] = claim
        client.flushall()
        channel.qos.reject("a", requeue=True)
        assert [again.job_id for again in take(client)] == ["a"] * back
