"""Jobs for a worker that is gone."""

from __future__ import annotations

import redis

from llorch_worker.broker import queues, registry
from llorch_worker.broker.queues import worker_lists, worker_queue
from tests.broker.jobs import DAYS_S, note_seen

QUEUE = worker_queue("toy", "gpu0@host")


def test_every_list_of_a_worker_that_is_gone_moves_to_its_shared_list(store: redis.Redis) -> None:
    moved_from = worker_lists(QUEUE)
    for name in moved_from:
        store.lpush(name, "a job", "another")
    note_seen(store, QUEUE, ago_s=DAYS_S)
    assert registry.reroute(store, "toy", grace_s=0) == {QUEUE: 2 * len(moved_from)}
    assert not store.exists(*moved_from)
    shared = queues.queues("toy")
    for name in queues.lists(shared):
        assert store.lrange(name, 0, -1) == ["another", "a job"]


def test_the_lists_of_a_worker_that_lives_stay(store: redis.Redis) -> None:
    note_seen(store, QUEUE)
    store.lpush(QUEUE, "a job")
    assert registry.reroute(store, "toy", grace_s=0) == {}
    assert store.llen(QUEUE) == 1
