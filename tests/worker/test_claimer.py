"""The thread that claims jobs, without Celery."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from llorch_worker.broker import keys, queues, scripts
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.waiting.wake_ups import WakeUps
from llorch_worker.worker import claimer as claimer_module
from llorch_worker.worker.claimer import MOST_JOBS_A_CLAIM, MOST_URGENT_JOBS, Claimer, Startable
from tests.broker.steps import TERMS, push, take
from tests.faults.proxy import LOCALHOST, FaultProxy, calls
from tests.messages import QUEUE
from tests.services import RedisServer, own_redis, wait_until
from tests.store import leases_in, record_of, waiting_ids

A_CLAIM = calls("claim")
HIGH = f"{QUEUE}{queues.HIGH_SUFFIX}"
CONSUMED = queues.queues("toy")

Start = Callable[..., Claimer]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with own_redis() as server:
        yield server


@pytest.fixture
def store(server: RedisServer) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        client.flushall()
        scripts.load(client, "claim")
        yield client


@pytest.fixture
def start(server: RedisServer, store: redis.Redis) -> Iterator[Start]:
    started = []

    def begin(url: str = server.url, prefetch_count: int = 0, **options: Any) -> Claimer:
        claimer = Claimer(
            url, lambda: "toy", replace(TERMS, lease_ms=60_000), "w@h",
            **{
                "sequences": lambda: MOST_JOBS_A_CLAIM,
                "startable": lambda _: Startable(MOST_JOBS_A_CLAIM),
                "place": lambda: "",
                "serves": dict,
                "on_arrival": lambda: None,
            } | options,
        )  # fmt: skip
        claimer.prefetch_count = prefetch_count
        started.append(claimer)
        claimer.queues = CONSUMED
        claimer.look_again()
        claimer.begin()
        return claimer

    yield begin
    for claimer in started:
        claimer.close()
    for claim in HELD_CLAIMS.all():
        HELD_CLAIMS.discard(claim)


def taken(claimer: Claimer, jobs: int) -> list[str]:
    """The loop takes so many jobs."""
    wait_until(lambda: len(claimer.arrived) == jobs)
    ids = [claim.job_id for claim in claimer.arrived]
    claimer.arrived.clear()
    claimer.wake()
    return ids


def push_high(store: redis.Redis, *job_ids: str) -> None:
    for job_id in job_ids:
        push(store, job_id)
        store.lmove(QUEUE, HIGH, "LEFT", "LEFT")
    for key in (keys.wake(HIGH), keys.full_wake(HIGH)):
        store.lpush(key, 1)


def blocked(store: redis.Redis) -> int:
    """How many connections wait."""
    return int(store.info("clients")["blocked_clients"])


@pytest.mark.parametrize("lost", ["reply", "request"])
def test_a_lost_claim_is_sent_again_and_no_job_waits_for_its_lease(
    server: RedisServer, store: redis.Redis, start: Start, lost: str
) -> None:
    push(store, "a", "b", "c")
    with FaultProxy(LOCALHOST, server.port) as proxy:
        trap = (proxy.lose_reply if lost == "reply" else proxy.lose_request)(A_CLAIM)
        claimer = start(proxy.url)
        assert trap.wait(60)
        assert taken(claimer, 3) == ["a", "b", "c"]
        for claim in HELD_CLAIMS.all():
            record = record_of(store, claim.job_id)
            assert (record["fence"], record["attempts"]) == (str(claim.fence), "1")
            assert (claim.attempt, claim.first) == (1, True)
        assert len(leases_in(store)) == 3
        push(store, "d")
        claimer.look_again()
        assert taken(claimer, 1) == ["d"]


def test_what_the_last_claim_took_is_known_at_the_end_although_its_reply_was_lost(
    server: RedisServer, store: redis.Redis, start: Start
) -> None:
    push(store, "a")
    with FaultProxy(LOCALHOST, server.port) as proxy:
        trap = proxy.lose_reply(A_CLAIM)
        claimer = start(proxy.url)
        assert trap.wait(60)
        claimer.close()
        assert [claim.job_id for claim in claimer.arrived] == ["a"]


def test_a_claim_after_one_that_was_refused_finds_all_jobs(start: Start) -> None:
    """Redis answered no claim, but the wake-up that told of jobs elsewhere is spent."""
    low = queues.route("toy", "low").list_key
    with own_redis() as other, connect(other.url) as client:
        push(client, "low")
        client.rename(QUEUE, low)
        push(client, "normal")
        client.config_set("min-replicas-to-write", 1)
        claimer = start(other.url)
        wait_until(lambda: client.info("errorstats").get("errorstat_NOREPLICAS"))
        client.config_set("min-replicas-to-write", 0)
        assert taken(claimer, 2) == ["normal", "low"]
        claimer.close()


def test_nothing_is_claimed_before_the_loop_has_taken_what_came(
    store: redis.Redis, start: Start
) -> None:
    """The job may use up the rate limit, or fill the worker."""
    claimer = start()
    push(store, "a")
    claimer.look_again()
    wait_until(lambda: len(claimer.arrived) == 1)
    push(store, "b")
    store.lpush(keys.wake(QUEUE), 1)
    for _ in range(2):  # after the second it has been through a whole iteration since the first
        claimer.look_again()
        wait_until(lambda: not select.select([claimer._wake_reader], [], [], 0)[0])
    assert [claim.job_id for claim in take(store)] == ["b"]
    assert taken(claimer, 1) == ["a"]


def test_a_worker_waits_until_more_may_start(store: redis.Redis, start: Start) -> None:
    left = [Startable(1), Startable(0, 0.2)]
    push(store, "a", "b")
    claimer = start(startable=lambda _: left[0])
    wait_until(lambda: len(claimer.arrived) == 1)
    del left[0]
    assert taken(claimer, 1) == ["a"]
    wait_until(lambda: blocked(store) == 0)
    left[:] = [Startable(1)]
    assert taken(claimer, 1) == ["b"], "nobody told it"


def test_a_full_worker_takes_high_jobs_alone_until_one_ends(
    store: redis.Redis, start: Start
) -> None:
    push(store, "a", "b", "c")
    claimer = start(prefetch_count=2)
    assert taken(claimer, 2) == ["a", "b"]
    wait_until(lambda: blocked(store) == 1)
    push_high(store, "high")
    assert taken(claimer, 1) == ["high"]
    assert store.llen(keys.wake(QUEUE)) == 1, "that of the job that is left to others"
    for claim in HELD_CLAIMS.all()[:2]:
        HELD_CLAIMS.discard(claim)
        claimer.note_room()
    assert taken(claimer, 1) == ["c"]


@pytest.mark.parametrize("prefetch_count", [1, 2])
def test_a_worker_that_ends_passes_a_wake_up_on(
    store: redis.Redis, start: Start, monkeypatch: pytest.MonkeyPatch, prefetch_count: int
) -> None:
    push(store, "a")
    claimer = start(prefetch_count=prefetch_count)
    assert taken(claimer, 1) == ["a"]
    wait_until(lambda: blocked(store) == 1)
    push(store, "b")

    def leave_amid_a_wake_up(wake_ups: WakeUps) -> bool:
        wake_ups.close()
        return True

    monkeypatch.setattr(WakeUps, "leave", leave_amid_a_wake_up)
    claimer.close()
    assert store.llen(keys.wake(QUEUE)) == 1


def test_a_full_worker_holds_some_high_jobs_more(store: redis.Redis, start: Start) -> None:
    jobs = [f"job{number}" for number in range(MOST_URGENT_JOBS + 1)]
    push(store, *jobs)
    claimer = start(prefetch_count=MOST_URGENT_JOBS + 1)
    assert taken(claimer, len(jobs)) == jobs
    high = [f"high{number}" for number in range(MOST_URGENT_JOBS + 1)]
    push_high(store, *high)
    assert taken(claimer, MOST_URGENT_JOBS) == high[:-1]
    wait_until(lambda: blocked(store) == 0)
    assert waiting_ids(store) == high[-1:]


def test_a_worker_whose_queues_are_cancelled_waits_for_none(
    store: redis.Redis, start: Start
) -> None:
    claimer = start()
    wait_until(lambda: blocked(store) == 1)
    claimer.queues = ()
    claimer.look_again()
    wait_until(lambda: blocked(store) == 0)
    push(store, "a")
    store.lpush(keys.wake(QUEUE), 1)
    claimer.queues = CONSUMED
    claimer.look_again()
    assert taken(claimer, 1) == ["a"]


def test_an_idle_worker_asks_redis_for_little(
    store: redis.Redis, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wait, one look at the lists, one correction of its load."""
    monkeypatch.setattr(claimer_module, "WAIT_S", 0.05)
    start(place=lambda: queues.place_of("toy", "w@h"))
    wait_until(lambda: blocked(store) == 1)
    store.config_resetstat()

    def counts() -> dict[str, int]:
        stats = store.info("commandstats")
        return {
            name: stats.get(f"cmdstat_{name}", {}).get("calls", 0)
            for name in ("blpop", "exists", "zadd", "evalsha")
        }

    wait_until(lambda: counts()["blpop"] >= 4)
    found = counts()
    assert found["evalsha"] == 0
    assert max(found["exists"], found["zadd"]) <= found["blpop"] + 1
