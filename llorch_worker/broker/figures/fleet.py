"""What all workers of a Redis together have to do, and what they can do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from redis import Redis

from llorch_worker.broker.fleet import recent_jobs, registry
from llorch_worker.broker.fleet.recent_jobs import RecentJobs
from llorch_worker.broker.fleet.registry import ModelCard, WorkerCard
from llorch_worker.broker.jobs import dead_letters, follow_ups
from llorch_worker.broker.queues import model_of
from llorch_worker.broker.scripts import run_script, text
from llorch_worker.broker.waiting.waiting import Queue, unserved, waiting
from llorch_worker.contract import Priority
from llorch_worker.contract.quantities import counted

SCAN_INTERVAL_S = 30.0
MOST_ORPHANED = 1_000
"""Jobs of dead workers that are counted."""


@dataclass(frozen=True)
class ModelLoad:
    """What one model has to do. Suspects count as jobs of their priority."""

    card: ModelCard
    queues: dict[Priority, Queue]
    suspects: int
    scheduled: int
    """Jobs that wait for their ETA; they are in no queue yet."""
    workers: int
    """Those that have loaded it, and those that do so once its jobs wait."""
    slots: int
    """Sequences that those which have loaded it can run at once."""
    running: int
    """Sequences that they run, as of their last announcements."""
    orphaned: int
    """Claimed jobs whose worker renews their leases no more. Others take them when these end."""
    ended: int
    """Jobs that ended, such as parts of chords, after which a worker has more to do. Counted only
    while no worker lives, as any does it soon."""
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
        """What the workers have to do: running + preempting + waiting + orphaned + ended."""
        return self.running + self.preempting + self.waiting + self.orphaned + self.ended

    @property
    def saturation(self) -> float | None:
        """The work by slots; above 1 jobs wait. None without workers."""
        return self.work / self.slots if self.slots else None


@dataclass(frozen=True)
class Fleet:
    """All that is known at one moment."""

    workers: Sequence[WorkerCard]
    """The live ones, by hostname, each once for every model that it keeps; their figures are up to
    5 s old."""
    models: Sequence[ModelLoad]
    """Every model that was ever served, by name."""
    dead_letters: int
    unserved: Mapping[str, int] = field(default_factory=dict)
    """Queues that no worker reads, with our jobs in them; up to :data:`SCAN_INTERVAL_S` old: see
    :func:`waiting.unserved`."""

    @property
    def worker_count(self) -> int:
        return len({worker.hostname for worker in self.workers})


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
    orphaned = Counter(
        model_of(text(name)) for name in run_script(client, "orphaned", [MOST_ORPHANED])
    )
    ended = Counter() if workers else follow_ups.count_due(client)
    return Fleet(
        workers=workers,
        models=[
            _load(client, card, workers, orphaned[card.name], ended[card.name]) for card in cards
        ],
        dead_letters=dead_letters.count(client),
    )


def _load(
    client: Redis, card: ModelCard, workers: Sequence[WorkerCard], orphaned: int, ended: int
) -> ModelLoad:
    found = waiting(client, card.name)
    serving = [worker for worker in workers if worker.model == card.name]
    return ModelLoad(
        card=card,
        queues=found.queues,
        suspects=found.suspects,
        scheduled=found.scheduled,
        workers=registry.count_serving(workers, card.name),
        slots=sum(worker.max_sequences for worker in serving),
        running=sum(worker.running for worker in serving),
        orphaned=orphaned,
        ended=ended,
        preempting=sum(worker.waiting for worker in serving),
        tokens_per_s=sum(worker.tokens_per_s for worker in serving),
        recent=recent_jobs.total(worker.recent for worker in serving),
        fingerprints=Counter(
            worker.fingerprint for worker in serving if not worker.awaits_first_load
        ),
        wrong_keys=found.wrong_keys,
    )
