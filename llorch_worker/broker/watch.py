"""Watching a model's lists for jobs that nobody rang for: see :mod:`.doorbell`.

Stock producers only push. One worker of each model, which holds a short lease, rings for them, and
once a second for whatever was missed. If it dies, another takes the lease within two seconds. Two
watchers at a time do no harm: a bell holds one ring.
"""

from __future__ import annotations

from collections.abc import Iterable

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
"""How often the watcher counts the workers."""
MOST_ASKED = 1000
"""About how many lists it asks for at a time. Redis answers nobody meanwhile."""


def lease(client: Redis, model: str) -> Lease:
    """Whoever has it watches ``model``."""
    return Lease(client, keys.watch(model), LEASE_S)


def leave(client: Redis, model: str) -> None:
    """Rings for all that waits, and ends the lease."""
    pass_ring_on(client, model)
    lease(client, model).leave()


def ring_for_all(client: Redis, model: str, news: QueueNews | None = None) -> float | None:
    """Rings if jobs for any worker wait or are due, and asks for news of the lists. Returns after
    how many seconds to look again, because jobs wait, now or for their time; None if there are
    none."""
    return _ring(client, queues.watched(model), news)


def ring_for_changed(
    client: Redis, model: str, changed: Iterable[str], news: QueueNews | None = None
) -> float | None:
    """:func:`ring_for_all`, for these lists, also of worker queues; other models' are skipped."""
    mine = [name for name in changed if queues.model_of(name) == model]
    return _ring(client, mine, news) if mine else None


def empty_moved_lists(client: Redis, own_queues: Iterable[str]) -> None:
    """Rings for jobs for one worker alone that wait in lists which only a watcher empties: they may
    have come while there was none. ``own_queues``: the workers'."""
    names = [
        name
        for queue in own_queues
        for each in (f"{queue}{queues.HIGH_SUFFIX}", queue)
        for name in queues.moved_lists(each)
    ]
    for first in range(0, len(names), MOST_ASKED):
        _ring(client, names[first : first + MOST_ASKED], None)


def pass_ring_on(client: Redis, model: str, consumed: Iterable[str] = ()) -> None:
    """Rings for all jobs that wait, because the caller took a ring for some and claims no more. In
    the queues that it ``consumed`` some may wait for it alone."""
    its_own = queues.lists(name for name in consumed if queues.WORKER_MARK in name)
    run_script(client, "ring", [1], [*queues.watched(model), *its_own])


def _ring(client: Redis, names: list[str], news: QueueNews | None) -> float | None:
    # A pop changes a list too, and mostly empties it.
    if not (news.any_exist(names) if news else client.exists(*names)):
        return None
    due_ms: int = run_script(client, "ring", [0], names)
    return min(LOOK_S, due_ms / 1e3) if due_ms > 0 else LOOK_S
