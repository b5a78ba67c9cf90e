"""Jobs that outlive their worker's connection, or what Redis knew of them, are settled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.jobs.settling import Settler
from tests.broker.steps import TERMS, push, take
from tests.faults.sentinel import PASSWORD, sentinel
from tests.services import LOCALHOST, own_redis, wait_until

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


@pytest.fixture(autouse=True)
def held() -> Iterator[None]:
    yield
    for claim in HELD_CLAIMS.all():
        HELD_CLAIMS.discard(claim)


def settler(client: redis.Redis) -> Settler:
    return Settler(client, TERMS, on_room=lambda: None)


def claimed(client: redis.Redis) -> Claim:
    push(client, "a")
    (claim,) = take(client)
    HELD_CLAIMS.add(claim)
    return claim


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_job_whose_connections_all_ended_is_settled(url: str, goes_back: bool) -> None:
    with connect(url, decode=False) as client, connect(url) as other:
        claim = claimed(client)
        other.client_kill_filter(_type="normal", skipme=True)
        settle = settler(client)
        (settle.hand_back if goes_back else settle.end)(claim)
        assert [again.job_id for again in take(other)] == ["a"] * goes_back
        assert not HELD_CLAIMS.all()


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_slot_is_free_although_redis_is_away_when_its_job_ends(goes_back: bool) -> None:
    told = []
    with own_redis() as server, connect(server.url, retries=0) as client:
        claim = claimed(client)
        server.halt()
        settle = Settler(client, TERMS, on_room=lambda: told.append(len(HELD_CLAIMS)))
        (settle.hand_back if goes_back else settle.end)(claim)
    assert told == [0]


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
def test_a_job_that_redis_lost_goes_back_only_if_no_end_of_it_can_have_expired(
    redis_url: str, taken_s_ago: float, renewed_s_ago: float | None, back: bool
) -> None:
    now_s = time.monotonic()
    with connect(redis_url) as client:
        push(client, "a")
        (taken,) = take(client)
        claim = replace(taken, taken_s=now_s - taken_s_ago)
        HELD_CLAIMS.add(claim)
        if renewed_s_ago is not None:
            HELD_CLAIMS.note_renewed([claim], now_s - renewed_s_ago)
        client.flushall()
        settler(client).hand_back(claim)
        assert [again.job_id for again in take(client)] == ["a"] * back
