"""Metrics of all workers together, read from Redis. Any gateway or exporter reports the same."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import connect_impatient
from llorch_worker.broker.figures.fleet import Fleet, FleetReader, ModelLoad
from llorch_worker.broker.jobs import usage
from llorch_worker.broker.jobs.usage import UsageRow
from llorch_worker.telemetry.metrics.families import counter, gauge

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
    takes_writes: bool


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
        is_up = found is not None and found.takes_writes
        yield gauge("redis_up", "Whether Redis takes writes.", (), [((), is_up)])
        if found is None:
            return
        for name, help, value in (
            ("redis_memory_bytes", "Memory that Redis uses.", found.used_bytes),
            ("redis_memory_max_bytes", "Redis' limit; 0 for none.", found.limit_bytes),
            ("fleet_dead_letters", "Dead letters.", found.fleet.dead_letters),
        ):
            yield gauge(name, help, (), [((), value)])
        yield from _queues(found.fleet)
        jobs = found.fleet.unserved
        longest = heapq.nlargest(MOST_UNSERVED, jobs, key=jobs.__getitem__)
        yield gauge(
            "fleet_unserved_queue_length",
            "Our jobs in a queue that no worker reads, up to 30 s ago.",
            ("queue",),
            [((queue,), jobs[queue]) for queue in longest],
        )
        models = found.fleet.models
        for name, (help, read) in _BY_MODEL.items():
            values = [((load.model,), read(load)) for load in models]
            yield gauge(f"fleet_{name}", help, ("model_name",), values)
        yield _backlog(found)
        yield from _used(found.used)

    def _read(self) -> _Reading | None:
        with self._reading:
            if time.monotonic() - self._read_at_s > FRESH_S:
                try:
                    info, day = self._redis.info(), usage.today()
                    self._last = _Reading(
                        fleet=self._reader.read(),
                        used=usage.read(self._redis, day, day),
                        used_bytes=int(info["used_memory"]),
                        limit_bytes=int(info["maxmemory"]),
                        takes_writes=_takes_writes(info),
                    )
                except RedisError as error:
                    if self._last is not None:
                        logger.warning("no figures of the fleet: %s", error)
                    self._last = None
                self._read_at_s = time.monotonic()
            return self._last


def _takes_writes(info: Mapping[str, Any]) -> bool:
    """Whether it is no replica, and can save; of its memory other figures tell."""
    saves = (info.get(f"{name}_status", "ok") for name in ("aof_last_write", "rdb_last_bgsave"))
    return info.get("role") != "slave" and all(each == "ok" for each in saves)


def _backlog(found: _Reading) -> Metric:
    """None of a model of which no job has ended today: nobody knows how long its jobs are."""
    jobs, tokens = Counter[str](), Counter[str]()
    for row in found.used:
        jobs[row.model] += row.jobs
        tokens[row.model] += row.prompt_tokens + row.completion_tokens
    return gauge(
        "fleet_backlog_tokens",
        "Tokens that the queued jobs take, if they are as today's jobs were.",
        ("model_name",),
        [
            ((load.model,), load.waiting * tokens[load.model] / jobs[load.model])
            for load in found.fleet.models
            if jobs[load.model]
        ],
    )


def _used(rows: list[UsageRow]) -> Iterable[Metric]:
    """Counters of this UTC day, which begin at 0 with it, as those of a restarted process do."""
    largest = heapq.nlargest(
        MOST_ROWS, rows, key=lambda row: row.prompt_tokens + row.completion_tokens
    )
    for name, (help, unit, kinds) in _USED.items():
        labels = ("tenant", "model_name", *(["kind"] if len(kinds) > 1 else []))
        values = [
            ((row.tenant, row.model, kind)[: len(labels)], unit * getattr(row, field))
            for row in largest
            for kind, field in kinds.items()
        ]
        yield counter(f"usage_{name}", f"{help} today.", labels, values)


def _queues(fleet: Fleet) -> Iterable[Metric]:
    labels = ("model_name", "priority")
    queues = {
        (load.model, priority): queue
        for load in fleet.models
        for priority, queue in load.queues.items()
    }
    jobs = [(names, queue.jobs) for names, queue in queues.items()]
    yield gauge("fleet_queue_length", "Jobs that wait.", labels, jobs)
    help = "How long the first in line has waited; 0 without jobs."
    ages = [(names, queue.oldest_s or 0.0) for names, queue in queues.items()]
    yield gauge("fleet_oldest_job_age_seconds", help, labels, ages)
