"""The position of a job that waits: how many jobs are claimed before it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from redis import Redis

from llorch_worker.broker.fleet.recent_jobs import RecentJobs
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.waiting import Position, position
from llorch_worker.client import Client
from tests.broker.figures.test_fleet import announce_worker
from tests.broker.steps import push, take


def place_of(store: Redis, job_id: str) -> int:
    found = position(store, job_id)
    assert found is not None, job_id
    return found.place


def claimed_in_order(store: Redis) -> list[str]:
    order = []
    while claims := take(store, limit=1):
        order += [claim.job_id for claim in claims]
    return order


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("tenants", "within"), [([None], 0), (["a"], 0), ([None, "a", "b"], 0)])
def test_as_many_jobs_are_claimed_before_it(
    producer: Client, seed: int, tenants: list[str | None], within: int
) -> None:
    drawn = random.Random(seed)
    store, ours = producer.redis, []
    for number in range(15):
        if drawn.random() < 0.3 and None in tenants:
            push(store, f"stock{number}")
        else:
            priority: Any = drawn.choice(["high", "normal", "normal", "low"])
            tenant = drawn.choice(tenants)
            ours.append(producer.submit(prompt="x", priority=priority, tenant=tenant).id)
    inbox_watch.look(store, "toy")
    places = {job_id: place_of(store, job_id) for job_id in ours}
    order = claimed_in_order(store)
    for job_id, place in places.items():
        assert abs(order.index(job_id) + 1 - place) <= within
        assert position(store, job_id) is None, "it has been claimed"


def test_it_is_found_among_thousands_of_another_producer(producer: Client) -> None:
    store = producer.redis
    first = producer.submit(prompt="x")
    push(store, *(f"stock{number}" for number in range(40)))
    inbox_watch.look(store, "toy")
    last = producer.submit(prompt="x")
    assert (place_of(store, first.id), place_of(store, last.id)) == (1, 42)
    assert place_of(store, "stock3") == 5
    push(store, *(f"another{number}" for number in range(2000)))
    assert place_of(store, first.id) == 1


def test_the_start_is_estimated_by_the_pace_of_the_models_workers(producer: Client) -> None:
    jobs = [producer.submit(prompt="x") for _ in range(3)]
    assert producer.job(jobs[1].id).status().position == Position(2, None)
    for name, per_min in (("a@h", 30.0), ("b@h", 90.0)):
        announce_worker(producer.redis, name, running=8, recent=RecentJobs(jobs_per_min=per_min))
    assert producer.job(jobs[1].id).status().position == Position(2, 1.0)
    announce_worker(producer.redis, "b@h", running=7, recent=RecentJobs(jobs_per_min=90.0))
    assert producer.job(jobs[1].id).status().position == Position(2, 0.5)
    announce_worker(producer.redis, "b@h", running=0)
    assert producer.job(jobs[1].id).status().position == Position(2, 0.0)
    jobs[0].cancel()
    assert jobs[0].status().position is None
