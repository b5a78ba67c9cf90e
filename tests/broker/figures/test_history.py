"""The ring of the last hour: one point a period, whoever asks, and no more than an hour."""

from __future__ import annotations

import json
import time
from unittest.mock import patch

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.figures import history
from llorch_worker.broker.fleet.recent_jobs import RecentJobs
from tests.broker.figures.test_fleet import announce_worker
from tests.broker.steps import push


def test_all_gateways_together_add_one_point_a_period(store: Redis) -> None:
    announce_worker(
        store,
        "gpu0@h",
        running=3,
        recent=RecentJobs(ended=10, failed=5, first_token_ms={40: 10}),
    )
    push(store, "a", "b")
    assert [history.note(store) for _ in range(3)] == [True, False, False]
    (point,) = history.history(store)
    assert (point.workers, point.running, point.waiting, point.tokens_per_s) == (1, 3, 2, 30.0)
    assert (point.failures_per_min, point.first_token_p95_ms is not None) == (1.0, True)
    store.delete(keys.HISTORY_LEASE)
    assert history.note(store)
    assert len(history.history(store)) == 2


def test_it_is_as_long_as_an_hour_and_reads_what_others_wrote(store: Redis) -> None:
    for number in range(200):
        at = {"at": time.time() - 30 * number, "workers": 1, "running": 0, "waiting": 0}
        store.rpush(keys.HISTORY, json.dumps({**at, "tokens_per_s": 1, "new": "field"}))
    store.lpush(keys.HISTORY, "no point")
    points = history.history(store)
    assert len(points) <= history.MOST_POINTS
    assert points[0].at > time.time() - history.SPAN_S - 1
    assert [point.at for point in points] == sorted(point.at for point in points)
    with patch.object(history.Lease, "take", return_value=True):
        history.note(store)
    assert store.llen(keys.HISTORY) == history.MOST_POINTS
    assert 0 < store.ttl(keys.HISTORY) <= history.SPAN_S
