"""Jobs for one worker alone: which workers have a queue of their own, and what becomes of the jobs
in it when the worker is gone.

A job that is sent to ``llorch.<model>@gpu0.host`` waits for that worker. It is a wish and not a
condition of the job: once the worker has not been seen for a while, any other of its model puts the
job into the queue of all. Nothing waits for ever for a worker that never comes back.
"""

from __future__ import annotations

import redis

from llorch_worker.broker import keys
from llorch_worker.broker.queues import lists, model_of, own_queues, worker_queue
from llorch_worker.broker.scripts import run_script

REMEMBERED_S = 24 * 3600
"""How long jobs are looked for in the queue of a worker that is gone."""
GONE_AFTER_S = 16
"""A worker that was not seen for so long, three of its announcements, is gone."""
MOST_REMEMBERED = 1_000
MOST_MOVED_JOBS = 1_000


def mark_seen(client: redis.Redis, queue: str) -> None:
    """The worker that ``queue`` belongs to is here."""
    seconds, microseconds = client.time()
    client.zadd(keys.WORKER_QUEUES, {queue: int(seconds) * 1000 + int(microseconds) // 1000})


def is_known(client: redis.Redis, model: str, worker: str) -> bool:
    """Whether a worker of this node name serves ``model``, or did within a day."""
    return client.zscore(keys.WORKER_QUEUES, worker_queue(model, worker)) is not None


def lists_of_worker(queue: str) -> list[str]:
    """Every Redis list of the worker whose normal own queue this is."""
    return lists(own_queues(queue))


def lists_of_workers(client: redis.Redis, model: str) -> list[str]:
    """Every Redis list of every worker that serves ``model``, or did within a day."""
    names = [str(name) for name in client.zrange(keys.WORKER_QUEUES, 0, -1)]
    return [entry for name in names if model_of(name) == model for entry in lists_of_worker(name)]


def reroute(client: redis.Redis, grace_s: float) -> dict[str, int]:
    """Gives every worker of the model what waits for one that is gone since ``grace_s``; returns
    how many jobs of which queue."""
    moved = run_script(
        client,
        "reroute",
        [
            round((GONE_AFTER_S + grace_s) * 1e3),
            REMEMBERED_S * 1000,
            MOST_REMEMBERED,
            MOST_MOVED_JOBS,
            *lists_of_worker(""),
        ],
    )
    names = [name.decode() if isinstance(name, bytes) else str(name) for name in moved[::2]]
    return dict(zip(names, map(int, moved[1::2]), strict=True))
