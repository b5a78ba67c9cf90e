"""What a job used is counted with its one end: once, whatever is sent again or was lost."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.jobs import usage
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import (
    Cancelled,
    GenerationResult,
    InternalError,
    LlorchError,
    Timings,
    Usage,
)
from tests.broker.jobs.test_ended_jobs import RESULT
from tests.broker.steps import push, take

USED = Usage(prompt=5, cached=2, completion=7)
TOOK = Timings(queue_ms=1, prefill_ms=10, first_token_ms=11, decode_ms=29.6)
DONE = RESULT.model_copy(update={"usage": USED, "timings": TOOK})
COUNTED = {
    "prompt_tokens": 5,
    "cached_tokens": 2,
    "completion_tokens": 7,
    "worker_ms": 40,
}
DAY_S = 24 * 3600


def cancelled_after(used: Usage, took: Timings) -> Cancelled:
    error = Cancelled("the end")
    error.spent = used, took
    return error


def finish(
    store: redis.Redis,
    claim: Claim,
    end: GenerationResult | LlorchError = DONE,
    tenant: object = "alice",
    keep_s: int = DAY_S,
) -> bool:
    spent = end.spent if isinstance(end, Cancelled) else None
    counted = usage.written(tenant, "toy", end, spent, keep_s)
    arguments: list[Any] = [claim.job_id, claim.fence, "{}", 60, "end", 60, "", counted]
    return bool(run_script(store, "finish", arguments))


def rows(store: redis.Redis, tenant: str | None = None) -> list[dict[str, Any]]:
    """What was counted, without the day."""
    day = usage.today()  # or, at midnight, yesterday
    found = usage.read(store, day - timedelta(1), day, tenant)
    wanted = ("tenant", "model", "jobs", "failed", *COUNTED)
    return [{name: getattr(row, name) for name in wanted} for row in found]


def row(tenant: str, **counts: int) -> dict[str, Any]:
    nothing = dict.fromkeys(("jobs", "failed", *COUNTED), 0)
    return {"tenant": tenant, "model": "toy"} | nothing | counts


@pytest.mark.parametrize(
    ("end", "tenant", "counted"),
    [
        (DONE, "alice", row("alice", jobs=1, **COUNTED)),
        (DONE, None, row("", jobs=1, **COUNTED)),
        (DONE, {"not": "a/name"}, row("", jobs=1, **COUNTED)),
        (cancelled_after(USED, TOOK), "alice", row("alice", jobs=1, **COUNTED)),
        (InternalError("the end"), "alice", row("alice", failed=1)),
        (Cancelled("before it ran"), "alice", None),
    ],
)
def test_an_end_counts_once_for_its_tenant(
    store: redis.Redis,
    end: GenerationResult | LlorchError,
    tenant: object,
    counted: dict[str, Any] | None,
) -> None:
    push(store, "a")
    (claim,) = take(store)
    for _ in range(2):  # the first reply was lost
        assert finish(store, claim, end, tenant)
    assert rows(store) == ([] if counted is None else [counted])


def test_a_worker_that_lost_its_claim_counts_nothing(store: redis.Redis) -> None:
    push(store, "a")
    (claim,) = take(store)
    assert not finish(store, replace(claim, fence=claim.fence - 1))
    assert rows(store) == []


def test_a_tenant_reads_its_own_rows_and_a_day_expires(store: redis.Redis) -> None:
    push(store, "a", "b", "c")
    for claim, tenant in zip(take(store), ("alice", "bob", "alice"), strict=True):
        assert finish(store, claim, tenant=tenant)
    twice = {name: 2 * amount for name, amount in COUNTED.items()}
    assert rows(store, "alice") == [row("alice", jobs=2, **twice)]
    assert [each["tenant"] for each in rows(store)] == ["alice", "bob"]
    (day,) = store.keys(keys.usage("*"))
    assert DAY_S - 60 < store.ttl(day) <= DAY_S


def test_without_days_nothing_is_counted(store: redis.Redis) -> None:
    push(store, "a")
    (claim,) = take(store)
    assert finish(store, claim, keep_s=0)
    assert not store.keys(keys.usage("*"))


def test_a_key_of_another_type_costs_no_result(store: redis.Redis) -> None:
    push(store, "a")
    (claim,) = take(store)
    seconds, _ = store.time()
    store.set(keys.usage(seconds // DAY_S), "somebody's")
    assert finish(store, claim)
    assert store.exists(keys.result("a"))
