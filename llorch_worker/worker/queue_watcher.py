"""Rings for jobs of producers that do not ring, ends jobs that wait beyond their deadline, and
frees those of workers that are gone, if no other worker of the model does."""

from __future__ import annotations

import random
import time
from itertools import chain
from typing import Any

import redis
from celery.utils.log import get_logger
from redis.exceptions import ResponseError

from llorch_worker.broker import registry, watch
from llorch_worker.broker.connection import own_connection
from llorch_worker.broker.deadlines import end_overdue
from llorch_worker.broker.queue_news import QueueNews
from llorch_worker.broker.queues import (
    WORKER_MARK,
    is_job_queue,
    watched,
    worker_lists,
)
from llorch_worker.broker.repeater import Repeater
from llorch_worker.broker.stopped_queues import StoppedQueues
from llorch_worker.broker.watch import COUNT_S, KEEP_S, LEASE_S, LOOK_S
from llorch_worker.settings import Settings

logger = get_logger(__name__)

READ_S = 0.2
"""How soon the thread notices that it must end."""
RUNG_S = 0.01
"""How long the worker that was rung has to claim before the watcher looks whether a job is left."""
PAUSE_S = 0.005
"""Between two looks, so that many pushes cost few. Redis reports the next change only after a
look."""
ACTIVE_S = 10.0
"""How long after the last change a ring may still be lost. Later only news may be."""
IDLE_LOOK_S = 5.0


class QueueWatcher(Repeater):
    """A thread that tries to become the watcher of the model, and then watches."""

    def __init__(self, client: redis.Redis, model: str, settings: Settings) -> None:
        self._redis = client
        self._settings = settings
        self._model = model
        self._lease = watch.lease(client, model)
        self._refused = False
        self._stopped = StoppedQueues()
        self.alone = True
        """Whether no other worker of the model is known."""
        super().__init__("watcher", "watch the queues", self._watch_or_wait)

    def _watch_or_wait(self) -> None:
        watches = self._lease.take()
        self.served()
        if watches:
            with own_connection(self._redis) as asking, own_connection(self._redis) as hearing:
                self._ring_until_lost(self._news(asking, hearing), hearing)
            if self.closing.is_set():
                watch.leave(self._redis, self._model)
        else:
            self.alone = False
        self.closing.wait(LOOK_S * random.uniform(0.9, 1.1))

    def _news(self, asking: Any, hearing: Any) -> QueueNews | None:
        try:
            return QueueNews(asking, hearing, self._model)
        except ResponseError as error:
            if not self._refused:
                logger.warning("jobs of stock producers wait up to a second: %s", error)
            self._refused = True
            return None

    def _ring_until_lost(self, news: QueueNews | None, connection: Any) -> None:
        keep_at_s = look_at_s = count_at_s = all_at_s = time.monotonic()
        held_until_s = keep_at_s + LEASE_S
        active_until_s = keep_at_s + ACTIVE_S
        changed: set[str] = set()  # the lists to look at next: each costs a command
        while not self.closing.is_set():
            now_s = time.monotonic()
            if now_s >= held_until_s:
                # This process was suspended, and another worker may watch by now.
                return
            if now_s >= keep_at_s:
                kept = self._lease.renew()
                end_overdue(self._redis, self._settings)
                if now_s >= count_at_s:
                    self._reroute()
                    changed |= self._filled_lists_of_workers()
                    count_at_s = now_s + COUNT_S
                # If the master is another one by now, no more news comes over this connection.
                if not kept or not self._redis.connection_pool.owns_connection(connection):
                    return
                if news is not None:
                    news.note_renewal()
                held_until_s, keep_at_s = now_s + LEASE_S, now_s + KEEP_S
            if now_s >= all_at_s:
                changed |= {*watched(self._model)}
                is_active = news is None or now_s < active_until_s
                all_at_s = now_s + _look_after(None if is_active else IDLE_LOOK_S)
            if changed and now_s >= look_at_s:
                after_s = watch.ring_for(self._redis, [*changed], news)
                all_at_s = min(all_at_s, now_s + _look_after(after_s)) if after_s else all_at_s
                changed.clear()
                self.closing.wait(PAUSE_S)
            next_s = min(all_at_s, keep_at_s, look_at_s if changed else all_at_s)
            found = self._hear(news, max(0.0, min(next_s - time.monotonic(), READ_S)))
            if lists := set(filter(is_job_queue, found)):
                # Whoever pushes and rings does both in one step. The others are bells.
                now_s = time.monotonic()
                heard_at_s = now_s + (RUNG_S if lists != found else 0.0)
                look_at_s = min(look_at_s, heard_at_s) if changed else heard_at_s
                active_until_s = now_s + ACTIVE_S
                changed |= lists

    def _reroute(self) -> None:
        try:
            moved = registry.reroute(self._redis, self._model, self._settings.direct_grace_s)
        except ResponseError as error:
            # The watcher's other work must not wait for it.
            logger.warning("cannot move the jobs of gone workers: %s", error)
            return
        for queue, jobs in moved.items():
            logger.warning("the worker of %s is gone; any worker may take its %d jobs", queue, jobs)

    def _filled_lists_of_workers(self) -> set[str]:
        """Their jobs may have come while nobody watched."""
        living = registry.living(self._redis, self._model)
        self.alone = len(living) < 2
        own = chain.from_iterable(map(worker_lists, living))
        filled = self._stopped.look(self._redis, [*watched(self._model), *own])
        return {name for name in filled if WORKER_MARK in name}

    def _hear(self, news: QueueNews | None, timeout_s: float) -> set[str]:
        """The lists and bells that have changed."""
        if news is not None:
            return news.read(timeout_s)
        self.closing.wait(timeout_s)
        return set()


def _look_after(asked_s: float | None) -> float:
    """Seconds until the next look at everything, not in step with jobs that come once a second."""
    return LOOK_S * random.uniform(0.8, 1.0) if asked_s in (None, LOOK_S) else asked_s
