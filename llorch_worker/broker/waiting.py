"""The jobs that wait in Redis for a worker."""

from __future__ import annotations

from dataclasses import dataclass

from redis import Redis

from llorch_worker.broker.direct import lists_of_all_own
from llorch_worker.broker.queues import lists, queues, suspects


@dataclass(frozen=True)
class Waiting:
    """How many jobs of one model wait, at every priority; ``suspects`` of them may have killed
    their last worker, ``direct`` of them wait for one worker alone."""

    jobs: int
    suspects: int
    direct: int


def lists_of(model: str) -> list[str]:
    """Every Redis list that jobs for any worker of ``model`` wait in, the suspects' last."""
    return [*lists(queues(model)), suspects(model)]


def waiting(client: Redis, model: str) -> Waiting:
    """The lengths of the model's lists now."""
    shared = lists_of(model)
    with client.pipeline(transaction=False) as pipe:
        for name in [*shared, *lists_of_all_own(client, model)]:
            pipe.llen(name)
        lengths = [int(length) for length in pipe.execute()]
    return Waiting(
        jobs=sum(lengths), suspects=lengths[len(shared) - 1], direct=sum(lengths[len(shared) :])
    )
