"""Metrics of all workers together, read from Redis. Any gateway or exporter reports the same."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import connect_impatient
from llorch_worker.broker.figures.fleet import Fleet, FleetReader, ModelLoad
from llorch_worker.broker.jobs import usage
from llorch_worker.broker.jobs.usage import UsageRow

logger = logging.getLogger(__name__)

FRESH_S = 1.0
MOST_UNSERVED = 20
"""Only the longest unserved queues are shown: producers choose the names, and each is a series."""
MOST_ROWS = 500
"""Tenants and models whose usage is shown, those with the most tokens: producers choose tenants."""

_BY_MODEL: Final[dict[str, tuple[str, Callable[[ModelLoad], float]]]] = {
    "workers": ("Live workers.", lambda load: load.workers),
    "models": (
        "Different models that live workers serve under this name.",
        lambda load: len(load.fingerprints),
    ),
    "slots": ("Sequences that the workers can run at once.", lambda load: load.slots),
    "running": ("Sequences that the workers ran up to 5 s ago.", lambda load: load.running),
    "waiting": ("Jobs that wait in Redis.", lambda load: load.waiting),
    "saturation": (
        "(running + preempting + waiting + orphaned) / slots, or the sum itself without slots.",
        lambda load: load.work / max(1, load.slots),
    ),
    "orphaned": ("Claimed jobs of dead workers.", lambda load: load.orphaned),
}


_USED: Final = {
    "jobs": ("Jobs that ended", 1.0, {"done": "jobs", "failed": "failed"}),
    "tokens": (
        "Tokens of ended jobs",
        1.0,
        {
            "prompt": "prompt_tokens",
            "cached": "cached_tokens",
            "completion": "completion_tokens",
        },
    ),
    "worker_seconds": ("Time of ended jobs in their workers", 1e-3, {"": "worker_ms"}),
}
"""Metric -> help, unit, and the field of a UsageRow by the label ``kind``, if it has one."""


@dataclass(frozen=True)
class _Reading:
    fleet: Fleet
    used: list[UsageRow]
    used_bytes: int
    limit_bytes: int


class FleetCollector(Collector):
    """Reads Redis at most once a second, however many ask. Thread-safe."""

    def __init__(self, redis_url: str) -> None:
        self._redis = connect_impatient(redis_url)
        self._reader = FleetReader(self._redis)
        self._reading = threading.Lock()
        self._last: _Reading | None = None
        self._read_at_s = float("-inf")

    def close(self) -> None:
        self._redis.close()

    def collect(self) -> Iterable[Metric]:
        """Only ``llorch_redis_up 0`` while Redis does not answer: old figures would mislead."""
        found = self._read()
        yield GaugeMetricFamily(
            "llorch_redis_up", "Whether Redis answers.", value=float(found is not None)
        )
        if found is None:
            return
        yield GaugeMetricFamily(
            "llorch_redis_memory_bytes", "Memory that Redis uses.", value=found.used_bytes
        )
        yield GaugeMetricFamily(
            "llorch_redis_memory_max_bytes", "Redis' limit; 0 for none.", value=found.limit_bytes
        )
        yield GaugeMetricFamily(
            "llorch_fleet_dead_letters", "Dead letters.", value=found.fleet.dead_letters
        )
        yield from _queues(found.fleet)
        unserved = GaugeMetricFamily(
            "llorch_fleet_unserved_queue_length",
            "Our jobs in a queue that no worker reads, up to 30 s ago.",
            labels=("queue",),
        )
        jobs = found.fleet.unserved
        for queue in heapq.nlargest(MOST_UNSERVED, jobs, key=jobs.__getitem__):
            unserved.add_metric((queue,), jobs[queue])
        yield unserved
        for name, (help, read) in _BY_MODEL.items():
            gauge = GaugeMetricFamily(f"llorch_fleet_{name}", help, labels=("model_name",))
            for load in found.fleet.models:
                gauge.add_metric((load.model,), read(load))
            yield gauge
        yield _backlog(found)
        yield from _used(found.used)

    def _read(self) -> _Reading | None:
        with self._reading:
            if time.monotonic() - self._read_at_s > FRESH_S:
                try:
                    memory, day = self._redis.info("memory"), usage.today()
                    self._last = _Reading(
                        fleet=self._reader.read(),
                        used=usage.read(self._redis, day, day),
                        used_bytes=int(memory["used_memory"]),
                        limit_bytes=int(memory["maxmemory"]),
                    )
                except RedisError as error:
                    if self._last is not None:
                        logger.warning("no figures of the fleet: %s", error)
                    self._last = None
                self._read_at_s = time.monotonic()
            return self._last


def _backlog(found: _Reading) -> Metric:
    """None of a model of which no job has ended today: nobody knows how long its jobs are."""
    jobs, tokens = Counter[str](), Counter[str]()
    for row in found.used:
        jobs[row.model] += row.jobs
        tokens[row.model] += row.prompt_tokens + row.completion_tokens
    backlog = GaugeMetricFamily(
        "llorch_fleet_backlog_tokens",
        "Tokens that the queued jobs take, if they are as today's jobs were.",
        labels=("model_name",),
    )
    for load in found.fleet.models:
        if jobs[load.model]:
            mean = tokens[load.model] / jobs[load.model]
            backlog.add_metric((load.model,), load.waiting * mean)
    return backlog


def _used(rows: list[UsageRow]) -> Iterable[Metric]:
    """Counters of this UTC day, which begin at 0 with it, as those of a restarted process do."""
    largest = heapq.nlargest(
        MOST_ROWS, rows, key=lambda row: row.prompt_tokens + row.completion_tokens
    )
    for name, (help, unit, kinds) in _USED.items():
        labels = ("tenant", "model_name", *(["kind"] if len(kinds) > 1 else []))
        counter = CounterMetricFamily(f"llorch_usage_{name}", f"{help} today.", labels=labels)
        for row in largest:
            for kind, field in kinds.items():
                values = (row.tenant, row.model, kind)[: len(labels)]
                counter.add_metric(values, unit * getattr(row, field))
        yield counter


def _queues(fleet: Fleet) -> Iterable[Metric]:
    labels = ("model_name", "priority")
    length = GaugeMetricFamily("llorch_fleet_queue_length", "Jobs that wait.", labels=labels)
    age = GaugeMetricFamily(
        "llorch_fleet_oldest_job_age_seconds",
        "How long the first in line has waited; 0 without jobs.",
        labels=labels,
    )
    for load in fleet.models:
        for priority, queue in load.queues.items():
            length.add_metric((load.model, priority), queue.jobs)
            age.add_metric((load.model, priority), queue.oldest_s or 0.0)
    yield length
    yield age
