"""What waits in Redis, and where nobody looks."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from celery import Celery
from redis.client import Pipeline

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.queues import place_of, route
from llorch_worker.broker.waiting.waiting import remedy_for, unserved
from tests.broker.steps import note_seen
from tests.services import RedisServer


@pytest.fixture(autouse=True)
def served(store: redis.Redis) -> None:
    note_seen(store, place_of("toy", "gpu0@host"))


def test_the_queue_of_a_mistyped_model_is_found_with_all_its_lists(store: redis.Redis) -> None:
    for priority in ("high", "normal", "low"):
        store.lpush(route("tyo", priority).list_key, "a job")
    assert unserved(store) == {"llorch.tyo": 3}


def test_a_queue_for_one_worker_alone_is_served_by_none(store: redis.Redis) -> None:
    store.lpush("llorch.toy@gpu0.host\x06\x169", "a job", "another")
    assert unserved(store) == {"llorch.toy@gpu0.host": 2}


def test_the_queue_of_a_producer_with_a_prefix_for_its_keys_is_found(store: redis.Redis) -> None:
    for priority in ("high", "normal", "low"):
        store.lpush(f"shop:{route('toy', priority).list_key}", "a job")
    assert unserved(store) == {"shop:llorch.toy": 3}


@pytest.mark.parametrize("queue", ["celery", "toy"])
@pytest.mark.parametrize("options", [{}, {"priority": 6}, {"compression": "gzip"}])
def test_jobs_without_the_name_of_a_queue_of_ours_are_found_among_other_tasks(
    store: redis.Redis, redis_server: RedisServer, queue: str, options: dict[str, Any]
) -> None:
    app = Celery(broker=redis_server.url)
    for task in ("mail.send", "llorch.generate", "llorch.generated"):
        app.send_task(task, kwargs={"prompt": '"task": "llorch.generate"'}, queue=queue, **options)
    store.set("toy\x06\x163", "no list")
    assert unserved(store) == {queue: 1}
    assert remedy_for(queue, ["toy"]) == 'its producer should say queue="llorch.toy"'
    assert remedy_for(queue, ["toy", "other"]) == (
        f'its producer should say queue="llorch.{"MODEL" if queue == "celery" else "toy"}"'
    )


def test_a_queue_that_the_user_of_redis_may_not_read_counts_no_jobs(
    store: redis.Redis, redis_server: RedisServer
) -> None:
    store.lpush("llorch.tyo", "a job")
    store.acl_setuser("gateway", enabled=True, nopass=True, keys=["llorch*"], categories=["+@all"])
    try:
        with connect(redis_server.url.replace("//", "//gateway:x@")) as client:
            assert unserved(client) == {"llorch.tyo": 1}
    finally:
        store.acl_deluser("gateway")


def test_queues_that_workers_serve_are_not_listed(store: redis.Redis) -> None:
    for priority in ("high", "normal", "low"):
        store.lpush(route("toy", priority).list_key, "a job")
    store.lpush(keys.wake("llorch.toy"), "a wake-up")
    store.set("llorch.tyo", "no list")
    assert unserved(store) == {}


def test_an_unserved_queue_is_found_among_many_other_keys(store: redis.Redis) -> None:
    store.mset({f"celery-task-meta-{number}": "" for number in range(20_000)})
    store.lpush("llorch.tyo", "a job")
    assert unserved(store) == {"llorch.tyo": 1}


def test_a_queue_that_is_emptied_meanwhile_is_not_listed(
    store: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.lpush("llorch.tyo", "a job")
    store.lpush("llorch.tyi", "a job")
    pipeline = store.pipeline

    def taken_first(*, transaction: bool) -> Pipeline:
        store.delete("llorch.tyo")
        return pipeline(transaction=transaction)

    monkeypatch.setattr(store, "pipeline", taken_first)
    assert unserved(store) == {"llorch.tyi": 1}


def test_a_queue_name_that_is_not_utf8_is_escaped(store: redis.Redis) -> None:
    store.lpush(b"llorch.ty\xff", "a job")
    store.lpush(b"llorch.ty\xff\x06\x169", "a job", "another")
    assert unserved(store) == {"llorch.ty\\xff": 3}
