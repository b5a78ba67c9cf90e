"""Worker queues: jobs for one worker alone, and their way to others when that worker is gone.

A job sent to ``llorch.<model>@gpu0.host`` waits for that worker. The worker is a preference, not a
condition: once it has not been seen for a while, any other worker of its model moves the job to the
shared queue. So no job waits for ever for a worker that never returns.
"""

from __future__ import annotations

import redis

from llorch_worker.broker import keys
from llorch_worker.broker.queues import (
    model_of,
    worker_lists,
    worker_queue,
)
from llorch_worker.broker.scripts import run_script, text

REMEMBERED_S = 24 * 3600
"""How long the queue of a worker that is gone is still checked."""
GONE_AFTER_S = 16
"""A worker that misses three announcements is gone."""
MOST_REMEMBERED = 1_000
MOST_MOVED_JOBS = 1_000


def mark_seen(client: redis.Redis, queue: str) -> None:
    """Notes that the worker of ``queue`` is alive."""
    seconds, microseconds = client.time()
    client.zadd(keys.WORKER_QUEUES, {queue: int(seconds) * 1000 + int(microseconds) // 1000})


def living(client: redis.Redis, model: str) -> list[str]:
    """The worker queues of the workers that serve ``model`` now."""
    seconds, _ = client.time()
    oldest_ms = (int(seconds) - GONE_AFTER_S) * 1000
    seen = map(str, client.zrangebyscore(keys.WORKER_QUEUES, oldest_ms, "+inf"))
    return [queue for queue in seen if model_of(queue) == model]


def is_known(client: redis.Redis, model: str, worker: str) -> bool:
    """Whether the worker with this node name serves ``model`` or did so within the last day."""
    return client.zscore(keys.WORKER_QUEUES, worker_queue(model, worker)) is not None


def lists_of_workers(client: redis.Redis, model: str) -> list[str]:
    """The lists of all worker queues of ``model`` that were used within the last day."""
    names = [str(name) for name in client.zrange(keys.WORKER_QUEUES, 0, -1)]
    return [entry for name in names if model_of(name) == model for entry in worker_lists(name)]


def reroute(client: redis.Redis, grace_s: float) -> dict[str, int]:
    """Moves jobs of workers that have been gone for ``grace_s`` to their models' shared queues.

    Returns the number of jobs moved from each worker queue.
    """
    moved = run_script(
        client,
        "reroute",
        [
            round((GONE_AFTER_S + grace_s) * 1e3),
            REMEMBERED_S * 1000,
            MOST_REMEMBERED,
            MOST_MOVED_JOBS,
            *worker_lists(""),
        ],
    )
    return {text(queue): jobs for queue, jobs in moved}
