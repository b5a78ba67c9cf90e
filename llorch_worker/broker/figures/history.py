"""What the fleet did in the last hour: a ring of points in Redis that all gateways keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict
from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.figures.fleet import read_fleet
from llorch_worker.broker.fleet import recent_jobs, stored
from llorch_worker.broker.fleet.leases import Lease
from llorch_worker.broker.fleet.recent_jobs import WINDOW_S, percentile_ms

SPAN_S = 3600
PERIOD_S = 30
MOST_POINTS = SPAN_S // PERIOD_S + 1
LOOK_S = 5.0
"""How often a gateway asks whether the next point is due."""


class Point(BaseModel):
    """The fleet at one moment. Durations and failures are of jobs of the last five minutes."""

    # Gateways of neighbouring versions read each other's points.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    at: float
    """Unix time by the gateway's clock."""
    workers: int
    running: int
    waiting: int
    tokens_per_s: float
    first_token_p50_ms: float | None = None
    first_token_p95_ms: float | None = None
    failures_per_min: float = 0.0


def note(client: Redis) -> bool:
    """Adds a point, unless one is not due yet or another gateway does. Raises ``RedisError``."""
    if not Lease(client, keys.HISTORY_LEASE, PERIOD_S - LOOK_S / 2).take():
        return False
    fleet = read_fleet(client)
    recent = recent_jobs.total(load.recent for load in fleet.models)
    point = Point(
        at=time.time(),
        workers=fleet.worker_count,
        running=sum(load.running for load in fleet.models),
        waiting=sum(load.waiting for load in fleet.models),
        tokens_per_s=sum(load.tokens_per_s for load in fleet.models),
        first_token_p50_ms=percentile_ms(recent.first_token_ms, 0.5),
        first_token_p95_ms=percentile_ms(recent.first_token_ms, 0.95),
        failures_per_min=recent.failed * 60 / WINDOW_S,
    )
    with client.pipeline(transaction=False) as pipe:
        pipe.lpush(keys.HISTORY, point.model_dump_json(exclude_none=True))
        pipe.ltrim(keys.HISTORY, 0, MOST_POINTS - 1)
        pipe.expire(keys.HISTORY, SPAN_S)
        pipe.execute()
    return True


def history(client: Redis) -> list[Point]:
    """The points of the last hour, the oldest first. Raises ``RedisError``."""
    documents = client.lrange(keys.HISTORY, 0, MOST_POINTS - 1)
    found = [stored.read(Point, document) for document in reversed(documents)]
    return [point for point in found if point is not None and point.at > time.time() - SPAN_S]


@contextmanager
def keeping_history(url: str) -> Iterator[None]:
    """Adds points meanwhile, in a thread."""
    with connect(url) as client:
        keeping = Repeater("history", "keep the history", lambda: note(client), LOOK_S)
        keeping.start()
        try:
            yield
        finally:
            keeping.close()
