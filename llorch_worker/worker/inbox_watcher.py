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

from llorch_worker.broker import keys, registry, watch
from llorch_worker.broker.connection import own_connection
from llorch_worker.broker.deadlines import end_overdue
from llorch_worker.broker.inbox_news import InboxNews
from llorch_worker.broker.repeater import Repeater
from llorch_worker.broker.waiting import wrong_keys
from llorch_worker.broker.watch import KEEP_S, LEASE_S, LOOK_S
from llorch_worker.settings import Settings

logger = get_logger(__name__)

READ_S = 0.2
"""How soon the thread notices that it must end."""
PAUSE_S = 0.005
"""Between two looks, so that many pushes cost few. Redis reports the next change only after a
look."""
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
        self._lease = watch.lease(client, model)
        self._refused = False
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
                self._move(rings_anyway=True)
                self._lease.leave()
        else:
            self.alone = False
        self.closing.wait(LOOK_S * random.uniform(0.9, 1.1))

    def _news(self, asking: Any, hearing: Any) -> InboxNews | None:
        try:
            return InboxNews(asking, hearing, self._model)
        except ResponseError as error:
            if not self._refused:
                logger.warning("jobs of stock producers wait up to a second: %s", error)
            self._refused = True
            return None

    def _watch_until_lost(self, news: InboxNews | None, connection: Any) -> None:
        keep_at_s = ring_at_s = look_at_s = count_at_s = time.monotonic()
        held_until_s = keep_at_s + LEASE_S
        while not self.closing.is_set():
            now_s = time.monotonic()
            if now_s >= held_until_s:
                # This process was suspended, and another worker may watch by now.
                return
            if now_s >= keep_at_s:
                kept = self._lease.renew()
                end_overdue(self._redis, self._settings)
                if now_s >= count_at_s:
                    self._count()
                    count_at_s = now_s + COUNT_S
                # If the master is another one by now, no more news comes over this connection.
                if not kept or not self._redis.connection_pool.owns_connection(connection):
                    return
                if news is not None:
                    news.note_renewal()
                held_until_s, keep_at_s = now_s + LEASE_S, now_s + KEEP_S
            if now_s >= ring_at_s or now_s >= look_at_s:
                after_s = self._look(news, rings_anyway=now_s >= ring_at_s)
                # Not in step with jobs that come once a second.
                pause_s = LOOK_S * random.uniform(0.8, 1.0)
                ring_at_s = now_s + pause_s if now_s >= ring_at_s else ring_at_s
                look_at_s = now_s + min(after_s, LOOK_S)
                self.closing.wait(PAUSE_S)
            next_s = min(keep_at_s, ring_at_s, look_at_s)
            if self._hear(news, max(0.0, min(next_s - time.monotonic(), READ_S))):
                look_at_s = time.monotonic()

    def _look(self, news: InboxNews | None, *, rings_anyway: bool) -> float:
        """Moves and rings; returns after how many seconds to look again."""
        filled = news is None or news.is_filled()
        waits = keys.waiting(self._model), keys.scheduled(self._model)
        # One command for a queue in which nothing happens.
        if not filled and not self._redis.exists(*waits):
            return LOOK_S
        again_s = self._move(rings_anyway=rings_anyway)
        return LOOK_S if again_s is None else again_s

    def _move(self, *, rings_anyway: bool) -> float | None:
        return watch.look(
            self._redis,
            self._model,
            weights=self._settings.tenant_weights,
            rings_anyway=rings_anyway,
            on_repeated=self._on_repeated,
        )

    def _count(self) -> None:
        self.alone = len(registry.living(self._redis, self._model)) < 2
        found = set(wrong_keys(self._redis, self._model))
        for sentence in found - self._wrong:
            logger.error("a queue is stopped: %s", sentence)
        self._wrong = found

    def _hear(self, news: InboxNews | None, timeout_s: float) -> bool:
        """Whether the inbox has changed."""
        if news is not None:
            return news.read(timeout_s)
        self.closing.wait(timeout_s)
        return False
