"""The jobs that wait in Redis for a worker."""

from __future__ import annotations

from dataclasses import dataclass

from redis import Redis

from llorch_worker.broker.queues import lists, queues, suspects


@dataclass(frozen=True)
class Waiting:
    """How many jobs of one model wait, at every priority; ``suspects`` of them may have killed
    their last worker."""

    jobs: int
    suspects: int


def lists_of(model: str) -> list[str]:
    """Every Redis list that jobs of ``model`` wait in, the suspects' last."""
    return [*lists(queues(model)), suspects(model)]


def waiting(client: Redis, model: str) -> Waiting:
    """The lengths of the model's lists now."""
    with client.pipeline(transaction=False) as pipe:
        for name in lists_of(model):
            pipe.llen(name)
        lengths = [int(length) for length in pipe.execute()]
    return Waiting(jobs=sum(lengths), suspects=lengths[-1])
