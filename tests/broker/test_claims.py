"""What a claim tells those who look at the job, and the worker; and what its end brings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from llorch_worker.broker import claims, keys
from llorch_worker.broker.claims import Claim, ClaimTerms
from llorch_worker.broker.connection import connect
from llorch_worker.broker.queues import suspects
from llorch_worker.broker.results import decode_state
from llorch_worker.broker.scripts import run_script
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.services import RedisServer

TERMS = ClaimTerms(lease_ms=60_000, max_attempts=3, result_ttl_s=60, stream_ttl_s=60)


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with connect(redis_server.url) as client:
        client.flushall()
        yield client


def claim_all(store: redis.Redis, terms: ClaimTerms = TERMS) -> list[Claim]:
    return claims.claim(
        store,
        lists=[QUEUE],
        suspects=suspects("toy"),
        held=(),
        limit=10,
        worker="w@h",
        terms=terms,
    )


def push(store: redis.Redis, **headers: str | None) -> None:
    store.lpush(QUEUE, json.dumps(envelope(GOOD_BODY, headers={"id": "a"} | headers)))


def take(store: redis.Redis, **headers: str | None) -> Claim:
    push(store, **headers)
    (claim,) = claim_all(store)
    return claim


def finish(store: redis.Redis, claim: Claim, first_entry: int, *events: str) -> int:
    stored: int = run_script(
        store,
        "finish",
        ["a", claim.fence, "{}", 60, "end", 60, first_entry, *events],
    )
    return stored


def entries(store: redis.Redis) -> list[tuple[str, str]]:
    return [(entry_id, fields["event"]) for entry_id, fields in store.xrange(keys.events("a"))]


@pytest.mark.parametrize("eta", [{}, {"eta": None}], ids=["none", "null"])
def test_a_claimed_job_has_begun_at_its_worker(
    store: redis.Redis, eta: dict[str, str | None]
) -> None:
    take(store, **eta)
    state = decode_state(store.get(keys.result("a")))
    assert (state.status, state.worker) == ("STARTED", "w@h")
    assert 0 < store.ttl(keys.result("a")) <= TERMS.result_ttl_s


def test_a_job_that_waits_for_its_time_has_not_begun(store: redis.Redis) -> None:
    take(store, eta="2100-01-01T00:00:00+00:00")
    assert store.get(keys.result("a")) is None


def test_a_claim_tells_of_a_cancel_before_it(store: redis.Redis) -> None:
    store.set(keys.cancel("a"), 1)
    assert take(store).cancelled


def test_a_claim_without_a_cancel_says_so(store: redis.Redis) -> None:
    assert not take(store).cancelled


def test_an_end_brings_the_entries_that_are_missing_each_once(store: redis.Redis) -> None:
    claim = take(store)
    store.xadd(keys.events("a"), {"event": "first"}, id="1-0")
    store.xadd(keys.events("a"), {"event": "second"}, id="2-0")
    assert finish(store, claim, 2, "second", "third") == 1
    assert finish(store, claim, 2, "second", "third") == 0
    assert entries(store) == [
        ("1-0", "first"), ("2-0", "second"), ("3-0", "third"), ("4-0", "end"),
    ]  # fmt: skip


def test_an_end_under_a_lost_claim_brings_nothing(store: redis.Redis) -> None:
    claim = take(store)
    store.hincrby(keys.job("a"), "fence", 1)
    assert finish(store, claim, 1, "first") == 0
    assert entries(store) == []


def test_an_entry_that_names_no_job_is_told_by_its_size_alone(
    store: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    store.lpush(QUEUE, "a secret", "{}")
    push(store)
    assert [claim.job_id for claim in claim_all(store)] == ["a"]
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "refused an entry of 8 bytes: it names no job",
        "refused an entry of 2 bytes: it names no job",
    ]


def test_a_queue_of_junk_is_told_in_few_lines_however_long_it_is(
    store: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    store.lpush(QUEUE, *["junk"] * 1_000)
    assert claim_all(store) == []
    assert store.llen(keys.DEAD) == 1_000
    *singly, rest = caplog.messages
    assert len(singly) == 10
    assert rest.startswith("990 more entries, of 3960 bytes together, are dead letters")


def test_a_job_without_attempts_left_is_told_by_its_id(
    store: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    lapsed = replace(TERMS, lease_ms=-1, max_attempts=1)
    push(store)
    assert claim_all(store, lapsed)
    assert claims.sweep(store) == ["a"]
    assert not caplog.messages
    assert not claim_all(store, lapsed)
    (line,) = caplog.messages
    assert line.startswith("job a is a dead letter: each of 1 attempts ended with the death")
