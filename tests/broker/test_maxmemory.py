"""What a worker writes for the jobs in its hands passes at maxmemory too: their ends make room."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import redis

from llorch_worker.broker import claims, dead_letters, journal, keys, scripts
from llorch_worker.broker.claims import Claim, ClaimTerms
from llorch_worker.broker.connection import connect
from llorch_worker.contract import InternalError, Tokens
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.services import own_redis, redis_binaries

TERMS = ClaimTerms(lease_ms=60_000, max_attempts=1, result_ttl_s=60, stream_ttl_s=60)
SUSPECTS = "llorch.toy:suspects"


@pytest.fixture(scope="module", params=redis_binaries(), ids=str)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of each Redis there is."""
    with own_redis(binary=request.param) as server:
        yield server.url


@pytest.fixture
def store(server_url: str) -> Iterator[redis.Redis]:
    with connect(server_url) as client:
        client.config_set("maxmemory", 0)
        client.flushall()
        yield client


def push(store: redis.Redis, *job_ids: str) -> None:
    for job_id in job_ids:
        store.lpush(QUEUE, json.dumps(envelope(GOOD_BODY, headers={"id": job_id})))


def take(store: redis.Redis, limit: int = 10) -> list[Claim]:
    return claims.claim(
        store, lists=[QUEUE], suspects=SUSPECTS, held=[], limit=limit, worker="w", terms=TERMS
    )


def fill(store: redis.Redis) -> None:
    """No room from now on, for any command that takes memory."""
    store.config_set("maxmemory-policy", "noeviction")
    store.config_set("maxmemory", 1)
    with pytest.raises(redis.ResponseError, match="maxmemory"):
        store.set("x", "y")


def append(store: redis.Redis, claim: Claim) -> object:
    scripts.load(store, "append")
    with store.pipeline(transaction=False) as pipe:
        tokens = Tokens(index=0, ids=(1,), text="a")
        journal.queue_append(pipe, claim, 1, [tokens], ttl_s=60)
        return pipe.execute()[0]


def test_waiting_jobs_are_claimed_journalled_renewed_and_ended(store: redis.Redis) -> None:
    push(store, "a", "b")
    fill(store)
    first, second = take(store)
    assert append(store, first) == 1
    assert claims.renew(store, [first, second], lease_ms=60_000) == []
    assert claims.fail(store, first, InternalError("x"), TERMS)
    assert claims.end(store, first, TERMS)
    assert claims.hand_back(store, second)
    assert store.llen(QUEUE) == 1
    assert store.exists(keys.result("a"))


def test_jobs_of_a_dead_worker_return_and_one_without_attempts_ends(store: redis.Redis) -> None:
    push(store, "a")
    take(store)
    store.zadd(keys.LEASES, {"a": 0})
    fill(store)
    assert claims.sweep(store) == ["a"]
    assert take(store) == []
    assert store.exists(keys.result("a"))
    assert store.llen(keys.DEAD) == 1


def test_what_is_no_message_is_buried(store: redis.Redis) -> None:
    push(store, "a")
    store.lpush(QUEUE, "no json")
    fill(store)
    (claim,) = take(store)
    assert dead_letters.bury(store, claim, "no task")
    assert store.llen(keys.DEAD) == 2
