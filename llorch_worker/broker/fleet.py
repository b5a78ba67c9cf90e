"""What all workers of a Redis together have to do, and what they can do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import get_args

from redis import Redis

from llorch_worker.broker import dead_letters, recent_jobs, registry
from llorch_worker.broker.queues import (
    WORKER_MARK,
    model_of,
    priority_of,
    scheduled,
    suspects,
    watched,
    worker_lists,
)
from llorch_worker.broker.recent_jobs import RecentJobs
from llorch_worker.broker.registry import ModelCard, WorkerCard
from llorch_worker.broker.scripts import run_script, text
from llorch_worker.broker.stopped_queues import wrong_key
from llorch_worker.broker.waiting import unserved
from llorch_worker.contract import Priority
from llorch_worker.contract.quantities import counted

SCAN_INTERVAL_S = 30.0
MOST_ABANDONED = 1_000
"""Jobs of dead workers that are counted."""
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


@dataclass(frozen=True)
class Queue:
    """The jobs of one model and priority that wait in Redis, worker queues included."""

    jobs: int
    oldest_s: float | None
    """How long the first of them has waited since it was enqueued, or retried; None if there is
    none, or none whose producer wrote the time."""


@dataclass(frozen=True)
class ModelLoad:
    """What one model has to do. Suspects count as jobs of normal priority."""

    card: ModelCard
    queues: dict[Priority, Queue]
    suspects: int
    direct: int
    """How many of the waiting jobs are in worker queues."""
    scheduled: int
    """Jobs that wait for their ETA; they are in no queue yet."""
    workers: int
    slots: int
    """Sequences that the workers can run at once."""
    running: int
    """Sequences that they run, as of their last announcements."""
    abandoned: int
    """Claimed jobs whose worker renews their leases no more. Others take them when these end."""
    preempting: int
    """Sequences that are in them and wait for room: as many urgent jobs preempt others."""
    tokens_per_s: float
    recent: RecentJobs
    """What ended in these workers in the last minutes."""
    fingerprints: Mapping[str, int]
    """Which models the workers serve under this name, each with the number of workers. One, except
    while they are replaced."""
    wrong_keys: Sequence[str] = ()
    """Sentences about keys at the names of its queues that hold no jobs and stop these queues."""

    @property
    def model(self) -> str:
        return self.card.name

    @property
    def waiting(self) -> int:
        return sum(queue.jobs for queue in self.queues.values())

    @property
    def mixture(self) -> str | None:
        """A sentence, if the workers serve several models under this name."""
        if len(self.fingerprints) < 2:
            return None
        listed = ", ".join(
            f"{fingerprint[:12] or 'unknown'} ({counted(workers, 'worker')})"
            for fingerprint, workers in self.fingerprints.items()
        )
        return f"{len(self.fingerprints)} different models are served as {self.model}: {listed}"

    @property
    def work(self) -> int:
        """What the workers have to do: running + preempting + waiting + abandoned."""
        return self.running + self.preempting + self.waiting + self.abandoned

    @property
    def saturation(self) -> float | None:
        """The work by slots; above 1 jobs wait. None without workers."""
        return self.work / self.slots if self.slots else None


@dataclass(frozen=True)
class Fleet:
    """All that is known at one moment."""

    workers: Sequence[WorkerCard]
    """The live ones, by hostname; their figures are up to 5 s old."""
    models: Sequence[ModelLoad]
    """Every model that was ever served, by name."""
    dead_letters: int
    unserved: Mapping[str, int] = field(default_factory=dict)
    """Queues that no worker reads, with our jobs in them; up to :data:`SCAN_INTERVAL_S` old: see
    :func:`waiting.unserved`."""


class FleetReader:
    """Reads the fleet again and again. Only a scan of the keys finds unserved queues."""

    def __init__(self, client: Redis) -> None:
        self._redis = client
        self._unserved: dict[str, int] = {}
        self._scanned_s = float("-inf")

    def read(self) -> Fleet:
        """Raises ``RedisError``."""
        fleet = read_fleet(self._redis)
        if time.monotonic() - self._scanned_s >= SCAN_INTERVAL_S:
            self._unserved = unserved(self._redis)
            self._scanned_s = time.monotonic()
        return replace(fleet, unserved=self._unserved)


def read_fleet(client: Redis) -> Fleet:
    """Reads it in a few round trips, without ``unserved``; no message crosses the network. Raises
    ``RedisError``."""
    workers = registry.workers(client)
    cards = sorted(registry.models(client).values(), key=lambda card: card.name)
    remembered = registry.remembered(client)
    abandoned = Counter(
        model_of(text(name)) for name in run_script(client, "abandoned", [MOST_ABANDONED])
    )
    return Fleet(
        workers=workers,
        models=[
            _load(client, card, workers, remembered.get(card.name, ()), abandoned[card.name])
            for card in cards
        ],
        dead_letters=dead_letters.count(client),
    )


def _load(
    client: Redis,
    card: ModelCard,
    workers: Sequence[WorkerCard],
    queues: Sequence[str],
    abandoned: int,
) -> ModelLoad:
    """``queues``: those of the model's workers."""
    model = card.name
    lists = [*watched(model), *chain.from_iterable(map(worker_lists, queues))]
    now_s, *heads = run_script(client, "heads", [], lists)
    serving = [worker for worker in workers if worker.model == model]
    found: list[tuple[str, int, float | None]] = [
        (
            lists[position - 1],
            jobs,
            max(0.0, float(now_s) - float(since)) if text(since) else None,
        )
        for position, jobs, since in heads
        if jobs >= 0
    ]
    scheduled_jobs = [jobs for name, jobs, _ in found if name == scheduled(model)]
    found = [each for each in found if each[0] != scheduled(model)]
    return ModelLoad(
        card=card,
        queues={each: _queue(each, found) for each in PRIORITIES},
        suspects=sum(jobs for name, jobs, _ in found if name == suspects(model)),
        direct=sum(jobs for name, jobs, _ in found if WORKER_MARK in name),
        scheduled=sum(scheduled_jobs),
        workers=len(serving),
        slots=sum(worker.max_sequences for worker in serving),
        running=sum(worker.running for worker in serving),
        abandoned=abandoned,
        preempting=sum(worker.waiting for worker in serving),
        tokens_per_s=sum(worker.tokens_per_s for worker in serving),
        recent=recent_jobs.total(worker.recent for worker in serving),
        fingerprints=Counter(worker.fingerprint for worker in serving),
        wrong_keys=[
            wrong_key(lists[position - 1], text(kind)) for position, jobs, kind in heads if jobs < 0
        ],
    )


def _queue(priority: Priority, found: Sequence[tuple[str, int, float | None]]) -> Queue:
    lines = [(jobs, age) for name, jobs, age in found if priority_of(name) == priority]
    ages = [age for _, age in lines if age is not None]
    return Queue(jobs=sum(jobs for jobs, _ in lines), oldest_s=max(ages, default=None))
