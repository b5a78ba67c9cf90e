"""Watching a model's lists for jobs that nobody rang for: see :mod:`.doorbell`.

Stock producers only push. One worker of each model, which holds a short lease, rings for them, and
once a second for whatever was missed. If it dies, another takes the lease within two seconds. Two
watchers at a time do no harm: a bell holds one ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from redis import Redis

from llorch_worker.broker import keys, queues
from llorch_worker.broker.leases import Lease
from llorch_worker.broker.queue_news import QueueNews
from llorch_worker.broker.scripts import run_script

LEASE_S = 1.8
KEEP_S = 1.2
"""How often the watcher renews it."""
LOOK_S = 1.0
"""How often the watcher looks at everything, and how often the others try to become it."""
COUNT_S = 10.0
"""How often the watcher looks at the queues of all workers."""


def lease(client: Redis, model: str) -> Lease:
    """Whoever has it watches ``model``."""
    return Lease(client, keys.watch(model), LEASE_S)


def leave(client: Redis, model: str) -> None:
    """Rings for all that waits, and ends the lease."""
    pass_ring_on(client, model)
    lease(client, model).leave()


def ring_for_all(client: Redis, model: str) -> float | None:
    """:func:`ring_for` the lists of jobs for any worker."""
    return ring_for(client, queues.watched(model))


def ring_for(client: Redis, lists: Sequence[str], news: QueueNews | None = None) -> float | None:
    """Rings if jobs wait in the ``lists`` or are due, and asks for news of them. Returns after how
    many seconds to look again, because jobs wait, now or for their time; None if there are none."""
    # A pop changes a list too, and mostly empties it.
    if not (news.any_exist(lists) if news else client.exists(*lists)):
        return None
    due_ms: int = run_script(client, "ring", [0], lists)
    return min(LOOK_S, due_ms / 1e3) if due_ms > 0 else LOOK_S


def pass_ring_on(client: Redis, model: str, consumed: Iterable[str] = ()) -> None:
    """Rings for all jobs that wait, because the caller took a ring for some and claims no more. In
    the queues that it ``consumed`` some may wait for it alone."""
    its_own = queues.lists(name for name in consumed if queues.WORKER_MARK in name)
    run_script(client, "ring", [1], [*queues.watched(model), *its_own])
