"""Announces this worker and what it serves in Redis, every few seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import count

import redis
from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import ModelCard, WorkerCard
from llorch_worker.broker.jobs.ended_jobs import ENDED_JOBS

logger = get_logger(__name__)


class Announcer(Repeater):
    """A thread that writes the worker's entry in the registry and removes it at the end."""

    def __init__(
        self,
        client: redis.Redis,
        hostname: str,
        make_card: Callable[[], WorkerCard],
        make_models: Callable[[], Iterable[ModelCard]] = tuple,
    ) -> None:
        """``make_models``: the other models that the worker serves, but has not loaded."""
        self._redis = client
        self._hostname = hostname
        self._make_models = make_models
        self._model: str | None = None
        """The one that it is announced with."""
        self._make_card = make_card
        self._compared: str | None = None
        """The one whose workers it was compared with."""
        self._announced = self._warned = self._leaving = False
        self._numbers = count()
        self._announcing = threading.Lock()
        every_s = registry.ANNOUNCE_INTERVAL_S
        super().__init__("announcer", "announce the worker", self._announce, every_s)

    def start(self) -> None:
        """Announces the worker once before it returns, so that clients already know its model."""
        self.attempt()
        super().start()

    def attempt(self) -> None:
        # A change of the model announces it on a thread of its own: no older card may come after,
        # and none once the worker has withdrawn.
        with self._announcing:
            if not self.closing.is_set():
                super().attempt()

    def leave(self) -> None:
        """Announces that the worker takes no more jobs, without waiting for Redis."""
        self._leaving = True
        threading.Thread(target=self.attempt, daemon=True).start()

    def close(self) -> None:
        super().close()
        try:
            with self._announcing:
                if self._model is not None:
                    registry.withdraw(self._redis, self._model, self._hostname)
            ENDED_JOBS.publish(self._redis)
        except RedisError as error:
            logger.warning(
                "cannot withdraw the worker from the registry; its entry expires: %s", error
            )

    def _announce(self) -> None:
        card = self._make_card()
        whole = next(self._numbers) % registry.WHOLE_EVERY == 0
        if self._model not in (None, card.model):
            registry.withdraw(self._redis, self._model, self._hostname)
            self._announced = False
        self._model = card.model
        for model in self._make_models() if whole else ():
            registry.announce_model(self._redis, model)
        replaced = registry.announce(self._redis, card, whole=whole, leaving=self._leaving)
        ENDED_JOBS.publish(self._redis)
        # The first entry found may be that of a dead worker; later ones must be this worker's.
        if self._announced and replaced is not None:
            self._warn_of_namesake(card, replaced)
        if not self._announced:
            self._warn_of_eviction()
        self._announced = True
        if card.fingerprint and self._compared != card.model:
            # Else its first load has not ended yet.
            self._compared = card.model
            self._warn_of_other_models(card)

    def _warn_of_namesake(self, card: WorkerCard, other: WorkerCard) -> None:
        if (other.pid, other.started_at) == (card.pid, card.started_at) or self._warned:
            return
        self._warned = True
        logger.warning(
            "another worker, process %d, is also named %s: both share one line "
            "in `llorch status`; give each worker its own name (-n)",
            other.pid,
            self._hostname,
        )

    def _warn_of_other_models(self, card: WorkerCard) -> None:
        try:
            cards = registry.takers(self._redis, card.model)
        except RedisError:
            return  # `llorch status` will say so
        served = [each for each in cards if not each.awaits_first_load]
        others = [each for each in served if each.fingerprint != card.fingerprint]
        if others:
            logger.warning(
                "%s serves another model as %s than this worker (%s, here %s), and %d workers in "
                "all do: jobs go on only with the model that began them",
                others[0].hostname,
                card.model,
                others[0].fingerprint or "unknown",
                card.fingerprint,
                len(others),
            )

    def _warn_of_eviction(self) -> None:
        try:
            policy = str(self._redis.info("memory").get("maxmemory_policy", "noeviction"))
        except RedisError:
            return  # Redis does not say
        if policy != "noeviction":
            logger.warning(
                "Redis may delete jobs, streams and results: its maxmemory-policy is %s; set it to "
                "noeviction",
                policy,
            )
