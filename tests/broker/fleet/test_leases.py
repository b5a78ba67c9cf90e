"""Work that processes share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import leases
from llorch_worker.broker.fleet.leases import Lease
from llorch_worker.broker.scripts import run_script
from tests.broker.test_maxmemory import fill
from tests.waiting import wait_until

KEY = "llorch:lease:test"
LEASE_S = 1.0
Prepare = Callable[[redis.Redis], None]

full_or_not = pytest.mark.parametrize(
    "prepare", [lambda _store: None, fill], ids=["room", "maxmemory"]
)


@pytest.fixture
def lease(store: redis.Redis) -> Lease:
    return Lease(store, KEY, LEASE_S)


@full_or_not
def test_one_process_has_a_lease_until_it_ends(
    store: redis.Redis, lease: Lease, prepare: Prepare
) -> None:
    prepare(store)
    assert [lease.take() for _ in range(2)] == [True, False]
    assert lease.renew()
    assert 0 < store.pttl(KEY) <= LEASE_S * 1e3
    lease.leave()
    assert not lease.renew()
    assert lease.take()


@full_or_not
def test_a_dead_holders_lease_ends_in_time_after_redis_clock_was_set_back(
    store: redis.Redis, lease: Lease, prepare: Prepare
) -> None:
    assert lease.take()
    store.pexpire(KEY, 3_600_000)
    prepare(store)
    assert not lease.take()
    assert 0 < store.pttl(KEY) <= LEASE_S * 1e3
    wait_until(lease.take)


def test_a_holder_that_lives_is_the_only_one_after_redis_clock_was_set_back(
    store: redis.Redis, lease: Lease
) -> None:
    """A second one would never end, because neither lets the lease lapse."""
    assert lease.take()
    store.pexpire(KEY, 3_600_000)
    assert not lease.take()
    assert lease.renew()
    assert not lease.take()


@full_or_not
def test_what_is_due_is_one_callers_until_its_lease_ends(
    store: redis.Redis, prepare: Prepare
) -> None:
    now_ms = store.time()[0] * 1e3
    store.zadd("work", {"a": 1, "b": 2, "c": 3, "later": now_ms + 30_000})
    prepare(store)
    first, second = (run_script(store, *leases.due("work", 60, 2)) for _ in range(2))
    assert (first, second) == (["a", "b"], ["c"])
    # Redis' seconds are whole here.
    assert store.zcount("work", now_ms + 59_000, store.time()[0] * 1e3 + 62_000) == 3


def test_what_was_taken_is_due_in_time_after_redis_clock_was_set_back(store: redis.Redis) -> None:
    now_ms = store.time()[0] * 1e3
    store.zadd("work", {"a": now_ms + 3_600_000})
    assert run_script(store, *leases.due("work", 60, 1, latest_s=7200)) == []
    assert store.zscore("work", "a") == now_ms + 3_600_000
    assert run_script(store, *leases.due("work", 60, 1)) == []
    assert store.zscore("work", "a") <= store.time()[0] * 1e3 + 62_000


def test_a_token_fences_off_whoever_had_the_piece(store: redis.Redis) -> None:
    store.hset(keys.gateway_document("a"), "fence", "old")
    store.zadd("work", {"a": 1})
    assert run_script(store, *leases.due("work", 60, 1, token="new")) == ["a"]
    assert store.hget(keys.gateway_document("a"), "fence") == "new"
