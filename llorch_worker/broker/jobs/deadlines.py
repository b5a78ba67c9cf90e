"""Ending jobs that wait beyond their deadline, whoever lives: a worker, a gateway or an exporter.

Workers end the jobs that they run. A job that waits after its worker's death fails too; its tokens
stay in its stream.
"""

from __future__ import annotations

from typing import Any

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.fleet.leases import due
from llorch_worker.broker.jobs.cancellation import end_waiting
from llorch_worker.broker.queues import model_of
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import DeadlineExceeded
from llorch_worker.contract.job_request import LONGEST_DEADLINE_S
from llorch_worker.settings import Settings

LOOK_S = 1.0
MOST_AT_ONCE = 100


def end_overdue(client: Redis, settings: Settings) -> None:
    """Fails all jobs that wait and whose deadline has passed. Raises ``RedisError``."""
    if not client.exists(keys.DEADLINES):
        return
    # One that runs is looked at again: its worker may die.
    overdue = due(keys.DEADLINES, LOOK_S, MOST_AT_ONCE, latest_s=LONGEST_DEADLINE_S)
    while True:
        job_ids = run_script(client, *overdue)
        for job_id in job_ids:
            error = DeadlineExceeded("the deadline passed while the job waited for a worker")
            if end_waiting(client, job_id, error, settings) != "running":
                client.zrem(keys.DEADLINES, job_id)
        if len(job_ids) < MOST_AT_ONCE:
            return


def note_deadline(client: Redis, job_id: str, at_ms: float) -> None:
    """Notes when a claimed job must have ended. Of a stock producer's nobody knew, and Redis may
    have lost that of any other."""
    client.zadd(keys.DEADLINES, {job_id: at_ms})


def next_deadlines(client: Redis, now_ms: int) -> dict[str, float]:
    """By model, after how many seconds the next deadline of its waiting jobs passes, as far as it
    is among the next :data:`MOST_AT_ONCE`. Raises ``RedisError``."""
    first: Any = client.zrange(keys.DEADLINES, 0, MOST_AT_ONCE - 1, withscores=True)
    due_ms: dict[str, float] = dict(first)
    found: dict[str, float] = {}
    if due_ms:
        with client.pipeline(transaction=False) as pipe:
            for job_id in due_ms:
                pipe.hmget(keys.job(job_id), "state", "list")
            records = pipe.execute()
        for at_ms, (state, list_key) in zip(due_ms.values(), records, strict=True):
            if state not in ("claimed", "scheduled", "ended") and list_key:
                # They are in order.
                found.setdefault(model_of(list_key), max(0.0, (at_ms - now_ms) / 1e3))
    return found
