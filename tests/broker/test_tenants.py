"""Tenants of one priority take turns, and nothing else about their jobs differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from llorch_worker.broker import claims, keys
from llorch_worker.broker.queues import tenants_list, worker_queue
from llorch_worker.client import Client
from llorch_worker.contract import QueueFull
from tests.broker.jobs import TERMS, announce, load, note_seen, push, take


def send(producer: Client, tenant: str | None, count: int, **fields: str) -> list[str]:
    return [producer.submit(prompt=f"{tenant}", tenant=tenant, **fields).id for _ in range(count)]


def claimed(store: redis.Redis, count: int, weights: str = "") -> list[str]:
    """Ids of the next jobs, claimed one by one."""
    terms = replace(TERMS, tenant_weights=weights)
    return [claim.job_id for _ in range(count) for claim in take(store, terms, limit=1)]


def names(order: list[str], **jobs: list[str]) -> str:
    """The first letters of the tenants whose jobs these are."""
    whose = {job_id: name for name, ids in jobs.items() for job_id in ids}
    return "".join(whose[job_id][0] for job_id in order)


def test_tenants_take_turns_and_keep_their_own_order(producer: Client) -> None:
    many = send(producer, "many", 50)
    few = send(producer, "few", 3)
    order = claimed(producer.redis, 53)
    assert names(order, many=many, few=few) == "mf" * 3 + "m" * 47
    assert [job_id for job_id in order if job_id in many] == many
    assert [job_id for job_id in order if job_id in few] == few
    assert list(producer.redis.scan_iter("llorch:tenants:*")) == []


def test_producers_without_a_tenant_are_one_tenant(producer: Client, store: redis.Redis) -> None:
    push(store, *(f"stock{n}" for n in range(20)))
    a, b = send(producer, "a", 5), send(producer, "b", 5)
    order = claimed(store, 12)
    stock = [f"stock{n}" for n in range(20)]
    assert names(order, a=a, b=b, stock=stock) == "absabsabsabs"


def test_a_tenant_that_sends_its_jobs_one_by_one_is_one_tenant_too(
    producer: Client, store: redis.Redis
) -> None:
    stock = [f"stock{n}" for n in range(4)]
    push(store, *stock)
    order = []
    for _ in range(4):
        send(producer, "a", 1)
        order += claimed(store, 1)
    assert [job_id in stock for job_id in order] == [False, True] * 2
    assert len(claimed(store, 9)) == 4
    assert list(store.scan_iter("llorch:tenants:*")) == []


def test_a_tenant_starts_as_many_jobs_in_its_turn_as_its_weight(producer: Client) -> None:
    heavy, light = send(producer, "heavy", 9), send(producer, "light", 3)
    order = claimed(producer.redis, 12, weights="other=9,heavy=3")
    assert names(order, heavy=heavy, light=light) == "hhhl" * 3


def test_a_claim_of_many_jobs_takes_turns_too(producer: Client) -> None:
    many, few = send(producer, "many", 20), send(producer, "few", 2)
    order = [claim.job_id for claim in take(producer.redis, limit=6)]
    assert names(order, many=many, few=few) == "mfmfmm"


def test_a_tenant_gains_no_turns_by_jobs_that_come_back(producer: Client) -> None:
    many, few = send(producer, "many", 8), send(producer, "few", 8)
    for claim in take(producer.redis, limit=4):
        claims.hand_back(producer.redis, claim)
    order = claimed(producer.redis, 16)
    assert sorted(names(order[:4], many=many, few=few)) == list("ffmm")
    assert names(order[4:], many=many, few=few) == "mf" * 6


def test_jobs_that_came_back_and_were_cancelled_bring_no_turns_either(producer: Client) -> None:
    many, few = send(producer, "many", 12), send(producer, "few", 8)
    for claim in take(producer.redis, limit=8):
        claims.hand_back(producer.redis, claim)
    for job_id in many[:4]:
        producer.job(job_id).cancel()
    order = claimed(producer.redis, 16)
    assert names(order, many=many, few=few) == "ffff" + "mf" * 4 + "mmmm"


def test_no_name_of_a_tenant_is_special(producer: Client, store: redis.Redis) -> None:
    push(store, *(f"stock{n}" for n in range(3)))
    send(producer, "a", 3)
    claimed(store, 3)
    for name in ("turns", "t", "0", "-", "."):
        send(producer, name, 2)
    assert len(claimed(store, 20)) == 13
    assert list(store.scan_iter("llorch:tenants:*")) == []


def test_with_weights_too_stock_jobs_are_one_tenant(producer: Client, store: redis.Redis) -> None:
    stock = [f"stock{n}" for n in range(4)]
    push(store, *stock)
    heavy, light = send(producer, "heavy", 9), send(producer, "light", 3)
    order = claimed(store, 10, weights="heavy=3")
    assert names(order, heavy=heavy, light=light, stock=stock) == "hhhlshhhls"


def test_jobs_outlive_a_deleted_list_of_turns(producer: Client, store: redis.Redis) -> None:
    send(producer, "a", 3)
    send(producer, "b", 3)
    store.delete(tenants_list("llorch.toy"))
    send(producer, "c", 1)
    assert len(claimed(store, 9)) == 5, "only the two in the list are lost"
    assert list(store.scan_iter("llorch:tenants:*")) == []


def test_a_placed_job_with_the_longest_names_brings_up_the_next(
    producer: Client, store: redis.Redis
) -> None:
    for name in ("w1", "w2"):
        note_seen(store, worker_queue("toy", f"{name}@{'h' * 250}"))
    place = worker_queue("toy", f"w1@{'h' * 250}")
    store.zadd(keys.load("llorch.toy"), {place: 0})
    for _ in range(3):
        producer.submit(prompt="x", tenant="t" * 100, affinity_key="k")
    assert place in (store.lindex(tenants_list("llorch.toy"), 0) or "")
    assert len(claimed(store, 4)) == 3


def test_priority_goes_before_turns(producer: Client) -> None:
    normal = send(producer, None, 2)
    low = send(producer, "a", 2, priority="low")
    high = send(producer, "b", 2, priority="high")
    assert claimed(producer.redis, 6) == [*high, *normal, *low]


def test_a_cancelled_job_of_a_tenant_does_not_hold_up_the_next(producer: Client) -> None:
    first, second, third = send(producer, "a", 3)
    producer.job(first).cancel()
    producer.job(second).cancel()
    assert claimed(producer.redis, 1) == [third]


def test_all_jobs_of_tenants_are_counted_wherever_they_wait(
    producer: Client, store: redis.Redis
) -> None:
    send(producer, "a", 7)
    send(producer, "b", 2)
    found = load(store)
    assert found.queues["normal"].jobs == 9


def test_jobs_behind_the_first_of_a_tenant_count_towards_the_limit(producer: Client) -> None:
    announce(producer.redis, 5)
    send(producer, "a", 4)
    send(producer, "b", 1)
    with pytest.raises(QueueFull, match="5 jobs"):
        send(producer, "c", 1)
