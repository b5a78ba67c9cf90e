"""The jobs that wait in Redis for a worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache

from redis import Redis
from redis.client import NEVER_DECODE

from llorch_worker.broker import keys
from llorch_worker.broker.queues import (
    QUEUE_PREFIX,
    lists,
    normal_queue,
    normal_queue_of,
    queues,
    suspects,
)
from llorch_worker.broker.worker_queues import lists_of_workers

SCANNED_AT_ONCE_KEYS = 5_000
MOST_SCANS = 200


@dataclass(frozen=True)
class Waiting:
    """How many jobs of one model wait, at every priority; ``suspects`` of them may have killed
    their last worker, ``direct`` of them wait for one worker alone."""

    jobs: int
    suspects: int
    direct: int


@lru_cache
def lists_of(model: str) -> tuple[str, ...]:
    """Every Redis list that jobs for any worker of ``model`` wait in, the suspects' last."""
    return *lists(queues(model)), suspects(model)


def waiting(client: Redis, model: str) -> Waiting:
    """The lengths of the model's lists now."""
    shared = lists_of(model)
    with client.pipeline(transaction=False) as pipe:
        for name in [*shared, *lists_of_workers(client, model)]:
            pipe.llen(name)
        lengths = [int(length) for length in pipe.execute()]
    return Waiting(
        jobs=sum(lengths), suspects=lengths[len(shared) - 1], direct=sum(lengths[len(shared) :])
    )


def unserved(client: Redis) -> dict[str, int]:
    """Queues of no model and no worker that is known, with the jobs that wait there at every
    priority.

    A stock producer that mistypes a model, or a worker, fills one. Only the keys themselves tell of
    them; of a Redis with more than a million a part is looked at. Bytes that are not UTF-8 stand in
    a queue's name as ``\\xff``.
    """
    known = {normal_queue(str(model)) for model in client.hkeys(keys.MODELS)}
    known |= {str(queue) for queue in client.zrange(keys.WORKER_QUEUES, 0, -1)}
    found: defaultdict[str, set[bytes]] = defaultdict(set)
    cursor = 0
    for _ in range(MOST_SCANS):
        cursor, names = _scan_lists(client, cursor)
        for name in names:
            found[normal_queue_of(name.decode(errors="backslashreplace"))].add(name)
        if not cursor:
            break
    places = [(queue, name) for queue in sorted(found.keys() - known) for name in found[queue]]
    with client.pipeline(transaction=False) as pipe:
        for _, name in places:
            pipe.llen(name)
        lengths = [int(length) for length in pipe.execute()]
    jobs: Counter[str] = Counter()
    for (queue, _), length in zip(places, lengths, strict=True):
        jobs[queue] += length
    # None where somebody took the jobs since the scan.
    return {queue: count for queue, count in jobs.items() if count}


def _scan_lists(client: Redis, cursor: int) -> tuple[int, list[bytes]]:
    """As ``client.scan``, with names as they are: anybody's list may be called anything."""
    match: list[str | int] = ["MATCH", f"{QUEUE_PREFIX}*", "COUNT", SCANNED_AT_ONCE_KEYS]
    scanned: tuple[int, list[bytes]] = client.execute_command(
        "SCAN", cursor, *match, "TYPE", "list", **{NEVER_DECODE: True}
    )
    return scanned
