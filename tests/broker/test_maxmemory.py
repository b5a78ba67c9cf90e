"""What a worker writes for the jobs in its hands passes at maxmemory too: their ends make room."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from llorch_worker.broker import keys, scripts
from llorch_worker.broker.jobs import claims, dead_letters, journal
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.contract import InternalError, Tokens
from tests.broker.steps import TERMS, push, sweep, take
from tests.messages import QUEUE
from tests.store import letters_in, set_leases, waiting_ids

ONE_ATTEMPT = replace(TERMS, max_deaths=1)


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
        journal.queue_append(pipe, claim, 1, [tokens])
        return pipe.execute()[0]


def test_waiting_jobs_are_claimed_journalled_renewed_and_ended(store: redis.Redis) -> None:
    push(store, "a", "b", "c")
    fill(store)
    first, second, third = take(store, ONE_ATTEMPT)
    assert append(store, first) == 1
    assert claims.renew(store, [first, second, third], lease_ms=60_000) == []
    assert claims.fail(store, first, InternalError("x"), ONE_ATTEMPT)
    assert claims.end(store, third, ONE_ATTEMPT)
    assert claims.hand_back(store, second)
    assert waiting_ids(store) == ["b"]
    assert store.exists(keys.result("a"))


def test_jobs_of_a_dead_worker_return_and_one_without_attempts_ends(store: redis.Redis) -> None:
    push(store, "a")
    take(store, ONE_ATTEMPT)
    set_leases(store, {"a": 0})
    fill(store)
    assert sweep(store) == ["a"]
    assert take(store, ONE_ATTEMPT) == []
    assert store.exists(keys.result("a"))
    assert len(letters_in(store)) == 1


def test_an_entry_that_is_not_a_message_is_buried(store: redis.Redis) -> None:
    push(store, "a")
    store.lpush(QUEUE, "no json")
    fill(store)
    (claim,) = take(store, ONE_ATTEMPT)
    assert dead_letters.bury(store, claim, "no task", TERMS)
    assert len(letters_in(store)) == 2


def test_a_script_costs_more_only_where_it_was_refused(store: redis.Redis) -> None:
    push(store, "a")
    held = take(store)
    store.config_resetstat()
    claims.renew(store, held, lease_ms=60_000)
    assert "cmdstat_persist" not in store.info("commandstats")
    fill(store)
    claims.renew(store, held, lease_ms=60_000)
    assert store.info("commandstats")["cmdstat_persist"]["calls"] == 1
