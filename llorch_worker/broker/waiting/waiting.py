"""The jobs that wait in Redis for a worker."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from redis import Redis
from redis.client import NEVER_DECODE

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.queues import (
    QUEUE_PREFIX,
    inbox,
    inbox_of,
    is_high,
    model_of,
    normal_queue,
    normal_queue_of,
    queue_of,
)
from llorch_worker.broker.scripts import as_bytes, run_script, text
from llorch_worker.contract import Priority, shown

CELERY_QUEUE = "celery"
"""Celery's default, where a job goes whose producer names no queue."""
SCANNED_AT_ONCE_KEYS = 5_000
MOST_SCANS = 200
CLASSES: tuple[Priority, ...] = ("high", "normal", "low")
"""As ``lua/parts/names.lua`` numbers them."""
PURGED_AT_ONCE_JOBS = 1_000


@dataclass(frozen=True)
class Queue:
    """The jobs of one model and priority that wait in Redis."""

    jobs: int
    oldest_s: float | None
    """How long the next of them has waited since it was enqueued, or retried; None if there is
    none, if it is still in the inbox, or if its producer wrote no time."""


@dataclass(frozen=True)
class Waiting:
    """What waits for the workers of a model, in the set and in the inbox."""

    queues: dict[Priority, Queue]
    suspects: int
    """Among the first hundred of each priority."""
    scheduled: int
    """Jobs that wait for their ETA."""
    wrong_keys: tuple[str, ...]
    """Sentences about keys at the names of inbox lists that hold no jobs."""


def waiting(client: Redis, model: str) -> Waiting:
    """Raises ``RedisError``."""
    reply = as_bytes(run_script(client, "figures", [model], inbox_of(model)))
    found = json.loads(reply.decode(errors="replace"))
    now_ms = found["now_ms"]
    return Waiting(
        queues={
            priority: Queue(
                each["jobs"],
                max(0.0, (now_ms - each["since_ms"]) / 1e3) if each["since_ms"] else None,
            )
            for priority, each in zip(CLASSES, found["classes"], strict=True)
        },
        suspects=found["suspects"],
        scheduled=found["scheduled"],
        wrong_keys=tuple(
            f"the key {shown(name)} holds a {kind}, not jobs; rename or delete it"
            for name, kind in found.get("wrong", ())
        ),
    )


def length(client: Redis, queue: str) -> int:
    """How many jobs of a queue wait. Raises ``RedisError``."""
    queues = waiting(client, model_of(queue)).queues
    return sum(each.jobs for name, each in queues.items() if (name == "high") == is_high(queue))


def purge(client: Redis, queue: str) -> int:
    """Deletes the jobs of a queue that wait; returns how many they were. Raises ``RedisError``."""
    deleted = 0
    while jobs := run_script(client, "purge", [queue, PURGED_AT_ONCE_JOBS], inbox([queue])):
        deleted += jobs
    return deleted


def lengths(client: Redis, lists: Iterable[str | bytes]) -> list[int]:
    """How many jobs are in each list now."""
    # No transaction: a server at maxmemory refuses even one that only reads.
    with client.pipeline(transaction=False) as pipe:
        for name in lists:
            pipe.llen(name)
        return [int(length) for length in pipe.execute()]


@dataclass(frozen=True)
class Position:
    """Where a job waits. Cancels, priorities and tenants' weights change it later."""

    place: int
    """1: it is next."""
    starts_in_s: float | None
    """0 if a worker has room for it. Otherwise at the pace at which the model's workers have ended
    jobs lately; None if they ended none."""


def position(client: Redis, job_id: str) -> Position | None:
    """None if the job does not wait for a worker, or in an inbox. Raises ``RedisError``."""
    return positions(client, [job_id]).get(job_id)


def positions(client: Redis, job_ids: Sequence[str]) -> dict[str, Position]:
    """Those of ``job_ids`` whose place is known; the workers of a model are read once. Raises
    ``RedisError``."""
    with client.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hget(keys.job(job_id), "list")
        models = {
            job_id: model_of(text(name))
            for job_id, name in zip(job_ids, pipe.execute(), strict=True)
            if name
        }
        for job_id, model in models.items():
            pipe.zrank(keys.waiting(model), job_id)
        ranks = dict(zip(models, pipe.execute(), strict=True))
    places = {job_id: (rank, models[job_id]) for job_id, rank in ranks.items() if rank is not None}
    paces = {
        model: registry.pace(client, model) for model in {model for _, model in places.values()}
    }
    return {job_id: _position(ahead, *paces[model]) for job_id, (ahead, model) in places.items()}


def _position(ahead: int, free: float, per_min: float) -> Position:
    if (must_end := ahead + 1 - free) <= 0:
        return Position(ahead + 1, 0.0)
    return Position(ahead + 1, must_end * 60 / per_min if per_min else None)


def unserved(client: Redis) -> dict[str, int]:
    """Queues that no worker of ours reads, with the number of our jobs that wait in each: those of
    unknown models or workers, ``celery`` and those that are named like a model.

    A stock producer that mistypes a model or a worker fills one, and so does one with a
    ``global_keyprefix``: its queue's name begins with that. Only a scan of the keys finds them; if
    Redis has more than a million keys, only a part is scanned. Bytes of a queue's name that are not
    UTF-8 appear as ``\\xff``.
    """
    served = registry.remembered(client)
    known = set(map(normal_queue, served))
    ours: defaultdict[str, set[bytes]] = defaultdict(set)
    others: defaultdict[str, set[bytes]] = defaultdict(set)
    cursor = 0
    for _ in range(MOST_SCANS):
        # Like ``client.scan``, but with names as bytes: other programs' keys need not be UTF-8.
        options = ("COUNT", SCANNED_AT_ONCE_KEYS, "TYPE", "list")
        cursor, names = client.execute_command("SCAN", cursor, *options, **{NEVER_DECODE: True})
        for name in names:
            shown = name.decode(errors="backslashreplace")
            if shown.startswith(keys.PREFIX):
                continue
            prefix, mark, _ = shown.partition(QUEUE_PREFIX)
            if mark:
                ours[prefix + normal_queue_of(shown.removeprefix(prefix))].add(name)
            elif (queue := queue_of(shown)) == CELERY_QUEUE or queue in served:
                others[queue].add(name)
        if not cursor:
            break
    jobs = {
        **{queue: _our_jobs(client, others[queue]) for queue in sorted(others)},
        **{queue: sum(lengths(client, ours[queue])) for queue in sorted(ours.keys() - known)},
    }
    # The jobs may have been taken since the scan.
    return {queue: count for queue, count in jobs.items() if count}


def _our_jobs(client: Redis, lists: Collection[bytes]) -> int:
    """How many jobs of ours wait in these, at most a hundred a list; none in a list that this user
    of Redis may not read."""
    return int(run_script(client, "misplaced", list(lists)))


def remedy_for(queue: str, models: Collection[str]) -> str:
    """What to change at the producer of a job that waits in an unserved queue."""
    prefix, ours, _ = queue.partition(QUEUE_PREFIX)
    if ours and prefix:
        return f"its producer's global_keyprefix is {prefix}"
    if ours:
        return "start a worker of that name, or correct the name at the producer"
    [model] = [queue] if queue in models else models if len(models) == 1 else ["MODEL"]
    return f'its producer should say queue="{normal_queue(model)}"'
