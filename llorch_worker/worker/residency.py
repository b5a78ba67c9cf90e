"""The resident model and what surrounds it in a worker."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from celery.utils.log import get_logger
from celery.worker import state
from redis.exceptions import RedisError

from llorch_worker.broker import dead_letters
from llorch_worker.broker.connection import connect
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.registry import WorkerCard
from llorch_worker.settings import Settings
from llorch_worker.worker.active_jobs import ActiveJobs
from llorch_worker.worker.announcer import Announcer
from llorch_worker.worker.cancellation import CancelListener
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.job_runner import JobRunner
from llorch_worker.worker.leases import RENEWALS_A_LEASE, LeaseKeeper
from llorch_worker.worker.publisher import Publisher
from llorch_worker.worker.residency_check import ResidencyCheck, violation
from llorch_worker.worker.resident_engine import ResidentEngine

logger = get_logger(__name__)

CLOSE_TIMEOUT_S = 10.0


class Residency:
    """One engine, the jobs in it, and the threads that speak with Redis for them.

    ``jobs`` runs them, on the pool's threads; ``cancel`` and ``hand_back`` may be called from
    anywhere.
    """

    def __init__(
        self,
        engine: ResidentEngine,
        settings: Settings,
        hostname: str,
        on_broken: Callable[[], None],
        *,
        assignment: Assignment | None = None,
    ) -> None:
        """``on_broken`` is called once the engine can run nothing more. ``assignment`` holds the
        card of this process, if it has one."""
        self.engine = engine
        self.running = ActiveJobs()
        self._settings = settings
        self._hostname = hostname
        self._on_broken = on_broken
        self._said_what_a_stop_waits_for = False
        self._assignment = assignment or Assignment(str(engine.stats().device))
        self._started_at = time.time()
        self._redis = connect(settings.redis_url)
        self.publisher = Publisher(
            self._redis,
            flush_interval_ms=settings.flush_interval_ms,
            stream_ttl_s=settings.stream_ttl_s,
            on_lost=self.hand_back,
            on_cancelled=self.cancel,
        )
        self._leases_redis = connect(
            settings.redis_url, reply_timeout_s=settings.lease_s / RENEWALS_A_LEASE
        )
        self._leases = LeaseKeeper(
            self._leases_redis,
            HELD_CLAIMS,
            lease_s=settings.lease_s,
            sweep_s=settings.sweep_s,
            direct_grace_s=settings.direct_grace_s,
            watchdog_s=settings.watchdog_s,
            stalled_for_s=engine.stalled_for_s,
            on_lost=self.hand_back,
            on_away=self._say_what_a_stop_waits_for,
        )
        self._listener = CancelListener(self._redis, self.running)
        self.jobs = JobRunner(
            engine,
            self.running,
            self.publisher,
            self._redis,
            hostname=hostname,
            key_ttl_s=settings.result_ttl_s,
            is_cancelled=self._listener.is_cancelled,
            end_worker=on_broken,
        )
        self._announcer = Announcer(self._redis, hostname, self._card)
        self._check = ResidencyCheck(
            lambda: violation(engine, self._assignment), settings.residency_check_s, self.leave
        )

    def start(self) -> None:
        self.publisher.start()
        self._leases.start()
        self._listener.start()
        self._announcer.start()
        self._check.start()

    def close(self) -> None:
        """Ends the engine and the threads; jobs must have ended before."""
        self._check.close()
        self._announcer.close()
        self._listener.close()
        self.engine.close()
        self.publisher.close(CLOSE_TIMEOUT_S)
        self._leases.close()
        self._leases_redis.close()
        self._redis.close()

    def cancel(self, job_id: str) -> None:
        """Cancels the job if it is here, within one engine step."""
        self.running.cancel(job_id)

    def hand_back(self, job_id: str) -> None:
        """Stops the job if it is here; it runs again elsewhere."""
        self.running.hand_back(job_id)

    def leave(self, reason: str) -> None:
        """Hands every job back, for other workers to go on with, and ends this one."""
        self.jobs.leave()
        logger.critical("%s; the worker ends, its jobs resume elsewhere", reason)
        for job_id in self.running.ids():
            self.hand_back(job_id)
        self._on_broken()

    def stats(self) -> dict[str, Any]:
        """The engine's figures as plain JSON. ``device`` is the card's own name, ``gpu3``: torch
        calls the only card that it sees cuda:0."""
        return dataclasses.asdict(self.engine.stats()) | {"device": self._assignment.name}

    def dead_letters(self) -> int | None:
        """How many wait at this Redis for an operator; None where Redis does not say."""
        try:
            return dead_letters.count(self._redis)
        except RedisError:
            return None

    def _say_what_a_stop_waits_for(self) -> None:
        """Once, where the worker is to end, told to or with a broken engine, and Redis is away."""
        if self._said_what_a_stop_waits_for or state.should_stop is None or not len(HELD_CLAIMS):
            return
        self._said_what_a_stop_waits_for = True
        logger.warning(
            "the worker is to end, but Redis is away: %d jobs here wait for it, at most %.0f s; "
            "then they are left to other workers",
            len(HELD_CLAIMS),
            self._settings.drain_s,
        )

    def _card(self) -> WorkerCard:
        stats = self.stats()
        return WorkerCard(
            hostname=self._hostname,
            pid=os.getpid(),
            model=self.engine.model_name,
            max_context=self.engine.max_context,
            max_sequences=self.engine.max_sequences,
            queue_limit=self._settings.queue_limit,
            device=self._assignment.name,
            started_at=self._started_at,
            last_seen=time.time(),
            engine=stats,
        )
