"""Ended jobs after whose end Celery has more to do: see :mod:`llorch_worker.worker.celery`."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.clock import now_ms
from llorch_worker.broker.fleet import leases
from llorch_worker.broker.queues import model_of
from llorch_worker.broker.scripts import run_script, text

AT_ONCE_JOBS = 100
MOST_COUNTED = 1_000


class FollowUp(NamedTuple):
    """A job that ended. What Redis has no more of it is empty."""

    job_id: str
    message: str
    document: str
    """Its result, as stored."""
    fence: str


def take(client: Redis, lease_s: float) -> list[FollowUp]:
    """Takes some; they are the caller's for ``lease_s``."""
    if not client.exists(keys.FOLLOW_UPS):
        return []
    job_ids = run_script(client, *leases.due(keys.FOLLOW_UPS, lease_s, AT_ONCE_JOBS))
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            # Before the result: if the job ends once more in between, it stays for another look.
            pipe.hget(keys.job(job_id), "fence")
            pipe.mget(keys.message(job_id), keys.result(job_id))
        found = iter(pipe.execute())
    return [
        FollowUp(job_id, message or "", document or "", fence or "")
        for job_id, fence, (message, document) in zip(job_ids, found, found, strict=True)
    ]


def count_due(client: Redis) -> Counter[str]:
    """By model, how many ended jobs wait for a worker that does so; at most :data:`MOST_COUNTED` in
    all. Raises ``RedisError``."""
    job_ids: Any = client.zrangebyscore(
        keys.FOLLOW_UPS, "-inf", now_ms(client), start=0, num=MOST_COUNTED
    )
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(keys.job(job_id), "list")
        return Counter(model_of(text(list_key)) for list_key in pipe.execute() if list_key)


def note_done(client: Redis, job_id: str, keep_s: int, fence: str | int) -> None:
    """Nothing more is to be done after that end; the job's record stays for ``keep_s``."""
    run_script(client, "followed_up", [job_id, keep_s, fence])
