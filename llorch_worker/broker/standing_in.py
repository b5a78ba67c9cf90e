"""What gateways and exporters do too, since the workers of a model may all be gone: jobs that wait
beyond their deadline end, and scheduled jobs wait once they are due.

Autoscaling starts a worker for jobs that wait. Without this, it would start none for a scheduled
job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.clock import now_ms
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.jobs.deadlines import LOOK_S, end_overdue
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.settings import Settings

LATE_S = 2.0
"""For so long a due job is left to its model's watcher, which a worker is."""


def release_late(client: Redis) -> None:
    """Lets scheduled jobs wait that were due :data:`LATE_S` ago. Raises ``RedisError``."""
    late_ms = now_ms(client) - 1e3 * LATE_S
    models: Any = client.hkeys(keys.MODELS)
    with client.pipeline(transaction=False) as pipe:
        for model in models:
            pipe.zcount(keys.scheduled(model), "-inf", late_ms)
        for model, late in zip(models, pipe.execute(), strict=True):
            if late:
                inbox_watch.look(client, model)


@contextmanager
def standing_in(settings: Settings) -> Iterator[None]:
    """Does so every second meanwhile, in a thread."""
    with connect(settings.redis_url) as client:

        def stand_in() -> None:
            end_overdue(client, settings)
            release_late(client)

        standing = Repeater("standing-in", "end overdue jobs, start due ones", stand_in, LOOK_S)
        standing.start()
        try:
            yield
        finally:
            standing.close()
