"""Fair shares: the order in which jobs of one priority are claimed, as tenants see it."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, permutations

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.waiting import purge
from llorch_worker.client import Client
from tests.broker.steps import announce, push, take, weigh

TOKENS = 100
"""What each of these jobs is expected to make: far more than its message."""


def send(producer: Client, tenant: str | None, count: int, **fields: str | int) -> list[str]:
    options = {"max_tokens": TOKENS} | fields
    return [
        producer.submit(prompt=f"{tenant}", tenant=tenant, **options).id  # type: ignore[arg-type]
        for _ in range(count)
    ]


def claimed(store: redis.Redis, count: int) -> list[str]:
    """Ids of the next jobs, claimed one by one."""
    return [claim.job_id for _ in range(count) for claim in take(store, limit=1)]


def worker_card(place: str) -> registry.WorkerCard:
    return registry.WorkerCard(
        hostname=place, pid=1, model="toy", max_context=4096, max_sequences=4, device="cpu",
        started_at=1, last_seen=1, engine={},
    )  # fmt: skip


def names(order: list[str], **jobs: list[str]) -> str:
    """The first letters of the tenants whose jobs these are."""
    whose = {job_id: name for name, ids in jobs.items() for job_id in ids}
    return "".join(whose[job_id][0] for job_id in order)


def test_tenants_take_turns_and_keep_their_own_order(producer: Client) -> None:
    many, few = send(producer, "many", 50), send(producer, "few", 3)
    order = claimed(producer.redis, 53)
    assert [sorted(names(order[at : at + 2], many=many, few=few)) for at in (0, 2, 4)] == [
        ["f", "m"]
    ] * 3
    assert [job_id for job_id in order if job_id in many] == many
    assert [job_id for job_id in order if job_id in few] == few


def test_jobs_of_many_tenants_that_are_alike_go_in_the_order_in_which_they_came(
    producer: Client,
) -> None:
    ids = [job_id for n in range(40) for job_id in send(producer, f"t{n}", 1)]
    assert claimed(producer.redis, 40) == ids


def test_tenants_share_by_tokens_and_not_by_jobs(producer: Client) -> None:
    long, short = send(producer, "long", 3, max_tokens=4000), send(producer, "short", 90)
    order = claimed(producer.redis, 60)
    shorts = names(order, long=long, short=short).split("l")
    # 4000 tokens and the bytes of a message, against 100 and as many.
    assert 20 <= len(max(shorts, key=len)) <= 45


def test_producers_without_a_tenant_are_one_tenant(producer: Client, store: redis.Redis) -> None:
    stock = [f"stock{n}" for n in range(20)]
    push(store, *stock)
    inbox_watch.look(store, "toy")
    a, b = send(producer, "a", 9, max_tokens=200), send(producer, "b", 9, max_tokens=200)
    found = Counter(names(claimed(store, 18), a=a, b=b, stock=stock))
    assert all(5 <= found[name] <= 7 for name in "abs"), found


def test_a_tenant_that_sends_its_jobs_one_by_one_gets_no_more_than_its_share(
    producer: Client,
) -> None:
    backlog, order = send(producer, "backlog", 6), []
    for _ in range(8):
        send(producer, "eager", 1)
        order += claimed(producer.redis, 1)
    found = [job_id in backlog for job_id in order]
    assert found.count(True) == 4, found


def test_a_tenant_that_was_idle_starts_again_beside_the_others(producer: Client) -> None:
    early = send(producer, "early", 40)
    assert claimed(producer.redis, 20) == early[:20]
    late = send(producer, "late", 20)
    order = claimed(producer.redis, 20)
    found = Counter(names(order, early=early, late=late))
    assert abs(found["l"] - found["e"]) <= 2, "it neither catches up nor waits behind"


def test_weights_of_the_models_card_divide_the_cost(producer: Client) -> None:
    weigh(producer.redis, "other=9,heavy=3")
    heavy, light = send(producer, "heavy", 18), send(producer, "light", 6)
    found = Counter(names(claimed(producer.redis, 12), heavy=heavy, light=light))
    assert 8 <= found["h"] <= 10, found


def test_a_claim_of_many_jobs_is_shared_too(producer: Client) -> None:
    many, few = send(producer, "many", 20), send(producer, "few", 2)
    order = [claim.job_id for claim in take(producer.redis, limit=6)]
    assert sorted(names(order[:4], many=many, few=few)) == list("ffmm")


def test_jobs_that_come_back_keep_their_places(producer: Client) -> None:
    many, few = send(producer, "many", 8), send(producer, "few", 8)
    first = take(producer.redis, limit=4)
    for claim in first:
        claims.hand_back(producer.redis, claim)
    order = claimed(producer.redis, 16)
    assert order[:4] == [claim.job_id for claim in first]
    assert sorted(order) == sorted([*many, *few])


def test_a_job_of_a_tenant_that_is_cancelled_does_not_hold_up_the_next(producer: Client) -> None:
    first, second, third = send(producer, "a", 3)
    producer.job(first).cancel()
    producer.job(second).cancel()
    assert producer.redis.zcard(keys.waiting("toy")) == 1
    assert claimed(producer.redis, 1) == [third]


def test_the_shares_of_tenants_that_are_idle_do_not_grow(producer: Client) -> None:
    for n in range(300):
        send(producer, f"t{n}", 1)
        assert len(claimed(producer.redis, 1)) == 1
    registry.announce(producer.redis, worker_card("w"))
    assert producer.redis.zcard(keys.shares("toy")) == 1
    send(producer, "backlog", 60, max_tokens=1)
    for n in range(60):
        send(producer, f"u{n}", 1, max_tokens=1)
        claimed(producer.redis, 1)
    registry.announce(producer.redis, worker_card("w"))
    assert producer.redis.zcard(keys.shares("toy")) <= 66


@pytest.mark.parametrize("seed", range(5))
def test_two_tenants_with_work_differ_by_the_sum_of_their_largest_costs_over_weight_at_most(
    producer: Client, seed: int
) -> None:
    draw = random.Random(seed)
    weigh(producer.redis, "b=2,c=5")
    weight = {"a": 1, "b": 2, "c": 5}
    cost: dict[str, float] = {}
    left: dict[str, int] = dict.fromkeys(weight, 0)
    whose: dict[str, str] = {}

    def some(tenant: str, count: int) -> None:
        for _ in range(count):
            most = draw.choice((1, 50, 400, 2000))
            (job_id,) = send(producer, tenant, 1, max_tokens=most)
            message_bytes = producer.redis.strlen(keys.message(job_id))
            cost[job_id] = (most + message_bytes // 4) / weight[tenant]
            whose[job_id] = tenant
            left[tenant] += 1

    for tenant in weight:
        some(tenant, 15)
    served: dict[str, float] = dict.fromkeys(weight, 0.0)
    largest = {name: max(c for j, c in cost.items() if whose[j] == name) for name in weight}
    while all(left.values()):
        for job_id in claimed(producer.redis, 1):
            served[whose[job_id]] += cost[job_id]
            left[whose[job_id]] -= 1
        for one, other in combinations(weight, 2):
            if left[one] and left[other]:
                # Units are whole, and arrivals take some.
                bound = largest[one] + largest[other] + 8
                assert abs(served[one] - served[other]) <= bound, (one, other)


@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_loses_by_cancels_what_it_cancelled_at_most_and_takes_it_from_nobody(
    producer: Client, seed: int
) -> None:
    draw = random.Random(seed)
    cost: dict[str, float] = {}
    left: dict[str, list[str]] = {"a": [], "b": []}
    served, cancelled = dict.fromkeys(left, 0.0), dict.fromkeys(left, 0.0)
    for _ in range(30):
        for tenant, waiting in left.items():
            for _ in range(4 if len(waiting) < 4 else 0):
                most = draw.choice((50, 400))
                (job_id,) = send(producer, tenant, 1, max_tokens=most)
                cost[job_id] = most + producer.redis.strlen(keys.message(job_id)) // 4
                waiting.append(job_id)
        for job_id in draw.sample(left["a"], 2):
            producer.job(job_id).cancel()
            left["a"].remove(job_id)
            cancelled["a"] += cost[job_id]
        for job_id in claimed(producer.redis, 2):
            (tenant,) = (name for name, waiting in left.items() if job_id in waiting)
            left[tenant].remove(job_id)
            served[tenant] += cost[job_id]
        bound = 2 * max(cost.values()) + 16
        for one, other in permutations(left, 2):
            assert served[one] - served[other] <= bound + cancelled[other], (one, other)
    assert cancelled["a"] > bound < served["a"]


def test_scores_are_whole_numbers_below_2_to_the_53(producer: Client) -> None:
    for priority, first in (("high", 0), ("normal", 2**51), ("low", 2 * 2**51)):
        (job_id,) = send(producer, "a", 1, priority=priority)
        score = producer.redis.zscore(keys.waiting("toy"), job_id)
        assert first <= score < first + 2**51 <= 2**53 - 2**51


def test_a_class_whose_tags_are_used_up_keeps_its_place_among_the_others(
    producer: Client,
) -> None:
    store = producer.redis
    store.zadd(keys.shares("toy"), {"1": 2 * 2**51 - 3, "1/a": 2 * 2**51 - 1})
    normal = send(producer, "a", 2) + send(producer, "b", 2)
    (low,) = send(producer, "a", 1, priority="low")
    (high,) = send(producer, "a", 1, priority="high")
    order = claimed(store, 6)
    assert (order[0], order[-1]) == (high, low)
    assert sorted(order[1:-1]) == sorted(normal)


def test_ten_thousand_low_jobs_do_not_delay_a_high_one_of_their_tenant(producer: Client) -> None:
    store = producer.redis
    send(producer, "a", 1, priority="low")
    first = 2 * 2**51
    store.zadd(keys.waiting("toy"), {f"low{n}": first + 10**6 * n for n in range(10_000)})
    store.zadd(keys.shares("toy"), {"2/a": first + 10**10})
    (high,) = send(producer, "a", 1, priority="high")
    assert claimed(store, 1) == [high]


def test_the_position_counts_the_jobs_before_it(producer: Client) -> None:
    announce(producer.redis)
    many, few = send(producer, "many", 10), send(producer, "few", 1)
    found = producer.job(few[0]).status().position
    assert found is not None
    assert found.place == 1 + claimed(producer.redis, 11).index(few[0])
    assert producer.job(many[0]).status().position is None


@pytest.mark.parametrize("end", ["cancel", "purge"])
def test_a_tenant_whose_jobs_have_all_gone_starts_again_with_the_others(
    producer: Client, end: str
) -> None:
    gone, others = send(producer, "gone", 20), send(producer, "others", 1)
    claimed(producer.redis, 2)
    others = send(producer, "others", 6)
    if end == "cancel":
        for job_id in gone:
            producer.job(job_id).cancel()
    else:
        purge(producer.redis, "llorch.toy")
        others = send(producer, "others", 6)
    back = send(producer, "gone", 6)
    order = names(claimed(producer.redis, 12), back=back, others=others)
    assert "b" in order[:3], order
    assert order.count("b") == 6, order
