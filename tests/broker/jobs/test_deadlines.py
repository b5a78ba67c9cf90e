"""Deadlines of jobs that wait."""

from __future__ import annotations

import redis

from llorch_worker.broker.jobs.deadlines import next_deadlines
from llorch_worker.client import Client
from tests.broker.steps import announce


def test_the_next_deadline_of_each_model_is_that_of_a_job_that_waits(
    store: redis.Redis, client: Client
) -> None:
    for model in ("a", "b", "c"):
        announce(store, name=model)
    for model, deadline_s in (("a", 50.0), ("a", 20.0), ("b", 90.0), ("c", None)):
        client.submit(model=model, prompt="x", deadline_s=deadline_s)
    ended = client.submit(model="b", prompt="x", deadline_s=5.0)
    ended.cancel()
    seconds, _ = store.time()
    due_s = next_deadlines(store, 1000 * int(seconds))
    assert due_s.keys() == {"a", "b"}
    assert 10 < due_s["a"] < 22
    assert 80 < due_s["b"] < 92
