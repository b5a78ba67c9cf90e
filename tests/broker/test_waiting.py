"""What waits in Redis, and where nobody looks."""

from __future__ import annotations

import pytest
import redis
from redis.client import Pipeline

from llorch_worker.broker import keys, queues
from llorch_worker.broker.queues import route, worker_queue
from llorch_worker.broker.waiting import unserved
from tests.broker.jobs import note_seen


@pytest.fixture(autouse=True)
def served(store: redis.Redis) -> None:
    note_seen(store, worker_queue("toy", "gpu0@host"))


def test_the_queue_of_a_mistyped_model_is_found_with_all_its_lists(store: redis.Redis) -> None:
    for priority in ("high", "normal", "low"):
        store.lpush(route("tyo", priority).list_key, "a job")
    assert unserved(store) == {"llorch.tyo": 3}


def test_the_queue_of_a_mistyped_worker_is_found(store: redis.Redis) -> None:
    store.lpush(route("toy", "low", "gpu7@host").list_key, "a job", "another")
    assert unserved(store) == {"llorch.toy@gpu7.host": 2}


def test_the_queue_of_a_producer_with_a_prefix_for_its_keys_is_found(store: redis.Redis) -> None:
    for priority in ("high", "normal", "low"):
        store.lpush(f"shop:{route('toy', priority).list_key}", "a job")
    assert unserved(store) == {"shop:llorch.toy": 3}


def test_queues_that_workers_serve_are_not_listed(store: redis.Redis) -> None:
    for worker in (None, "gpu0@host"):
        for priority in ("high", "normal", "low"):
            store.lpush(route("toy", priority, worker).list_key, "a job")
    store.lpush(queues.suspects("toy"), "a job")
    store.lpush(keys.bell("llorch.toy"), "a ring")
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
