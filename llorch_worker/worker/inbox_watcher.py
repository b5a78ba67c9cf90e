"""Moves jobs of stock producers out of a model's inbox, and ends jobs that wait beyond their
deadline, if no other worker of the model does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import redis
from celery.utils.log import get_logger
from redis.exceptions import ResponseError

from llorch_worker.broker.connections.connection import own_connection, unless_refused
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.jobs.deadlines import end_overdue
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.inbox_news import InboxNews
from llorch_worker.broker.waiting.inbox_watch import KEEP_S, LEASE_S, LOOK_S, TAKE_S
from llorch_worker.broker.waiting.waiting import waiting
from llorch_worker.settings import Settings

logger = get_logger(__name__)

READ_S = 0.2
"""How soon the thread notices that it must end."""
PAUSE_S = 0.02
"""How long a worker has to claim what has come, before the watcher moves it to the jobs that
wait."""
COUNT_S = 10.0
"""How often the watcher looks for other workers, and for keys of another type in the inbox."""


class InboxWatcher(Repeater):
    """A thread that tries to become the watcher of the model, and then watches."""

    def __init__(
        self,
        client: redis.Redis,
        model: str,
        settings: Settings,
        on_repeated: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``on_repeated``: see :func:`.watch.look`."""
        self._redis = client
        self._settings = settings
        self._model = model
        self._on_repeated = on_repeated
        self._lease = inbox_watch.lease(client, model)
        self._refused = False
        self._moved = self._filled = False
        """Whether the next news is of its own move; whether something was left after that."""
        self._wrong: set[str] = set()
        self.alone = True
        """Whether no other worker of the model is known."""
        super().__init__("watcher", "watch the inbox", self._watch_or_wait)

    def _watch_or_wait(self) -> None:
        watches = self._lease.take()
        self.served()
        if watches:
            with own_connection(self._redis) as asking, own_connection(self._redis) as hearing:
                self._watch_until_lost(self._news(asking, hearing), hearing)
            if self.closing.is_set():
                self._look(wakes_anyway=True)
                self._lease.leave()
        else:
            self.alone = False
        self.closing.wait(TAKE_S * random.uniform(0.9, 1.1))

    def _news(self, asking: Any, hearing: Any) -> InboxNews | None:
        try:
            return InboxNews(asking, hearing, self._model)
        except ResponseError as error:
            if not self._refused:
                logger.warning("jobs of stock producers wait up to a second: %s", error)
            self._refused = True
            return None

    def _watch_until_lost(self, news: InboxNews | None, connection: Any) -> None:
        keep_at_s = beat_at_s = count_at_s = move_at_s = time.monotonic()
        held_until_s = keep_at_s + LEASE_S
        while not self.closing.is_set():
            now_s = time.monotonic()
            if now_s >= held_until_s:
                # This process was suspended, and another worker may watch by now.
                return
            if now_s >= keep_at_s:
                kept = self._lease.renew()
                # If the master is another one by now, no more news comes over this connection.
                if not kept or not self._redis.connection_pool.owns_connection(connection):
                    return
                if news is not None:
                    news.note_renewal()
                held_until_s, keep_at_s = now_s + LEASE_S, now_s + KEEP_S
            if now_s >= count_at_s:
                self._count()
                count_at_s = now_s + COUNT_S
            if now_s >= beat_at_s:
                # Not in step with jobs that come once a second.
                beat_at_s = now_s + min(self._beat(news), LOOK_S * random.uniform(0.8, 1.0))
            if news is not None and now_s >= move_at_s:
                move_at_s = now_s + self._move(news)
            next_s = min(keep_at_s, beat_at_s, move_at_s)
            if self._hear(news, max(0.0, min(next_s - time.monotonic(), READ_S))):
                move_at_s = min(move_at_s, time.monotonic() + PAUSE_S)

    def _beat(self, news: InboxNews | None) -> float:
        """Does what is due, and wakes a worker for whatever waits. Returns after how many seconds
        to look again."""
        if news is not None and not news.has_work():
            return LOOK_S
        end_overdue(self._redis, self._settings)
        return self._look(wakes_anyway=True)

    def _move(self, news: InboxNews) -> float:
        """Moves what is still in the inbox; returns after how many seconds to look again."""
        self._moved = self._filled = news.is_filled()
        return self._look() if self._filled else float("inf")

    def _look(self, *, wakes_anyway: bool = False) -> float:
        again_s = inbox_watch.look(
            self._redis,
            self._model,
            wakes_anyway=wakes_anyway,
            on_repeated=self._on_repeated,
        )
        return LOOK_S if again_s is None else again_s

    def _count(self) -> None:
        self.alone = registry.is_alone(self._redis, self._model)
        found = set(waiting(self._redis, self._model).wrong_keys) if self._filled else set()
        for sentence in found - self._wrong:
            logger.error("a queue is stopped: %s", sentence)
        self._wrong = found

    def _hear(self, news: InboxNews | None, timeout_s: float) -> bool:
        """Wakes a worker for what has come to the inbox; whether something has."""
        if news is None:
            self.closing.wait(timeout_s)
            return False
        lists = news.read(timeout_s)
        if lists and not self._moved:
            with unless_refused():
                inbox_watch.wake(self._redis, self._model, lists)
        self._moved = self._moved and not lists
        return bool(lists)
