"""Renews this worker's leases and returns the jobs of dead workers to their queues."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import redis
from celery.utils.log import get_logger
from celery.worker import state
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoReply

from llorch_worker.broker import keys
from llorch_worker.broker.connections.outage import RedisOutage
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.fleet.leases import Lease
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.settings import Settings

logger = get_logger(__name__)

RENEWALS_A_LEASE = 4
_AWAY = (NoConnection, NoReply)
"""Errors that mean that Redis did not answer; every other error is an answer."""


class LeaseKeeper(Repeater):
    """A thread with its own Redis connection, which renews leases even while the worker drains or
    its broker connection is down.

    It sweeps twice in every ``sweep_s``, so that a job resumes within a lease and ``sweep_s`` with
    some time for its claim. One sweep is enough for a fleet, so one worker does it: a key that
    expires shows that one has swept.

    It sweeps at its start too: a worker that replaces a dead one may not live until its second
    sweep. After an outage, or the start of Redis, the thread waits before it sweeps, so that other
    live workers that were cut off renew first.
    """

    def __init__(
        self,
        client: redis.Redis,
        settings: Settings,
        *,
        on_lost: Callable[[Claim], None],
    ) -> None:
        """``on_lost`` is called with a claim that was lost."""
        self._redis = client
        self._settings = settings
        self._lease_ms = round(settings.lease_s * 1e3)
        self._on_lost = on_lost
        self._warned = False
        self._leases_exist = True
        self._renewal = RedisOutage("renew leases")
        self._sweeping = RedisOutage("look for jobs of dead workers")
        self._renewed_s = time.monotonic()
        self._cut_off = False
        self._sweep_every_s = settings.sweep_s / 2
        self._sweep_at_s = self._renewed_s + self._sweep_every_s
        period_s = min(settings.lease_s / RENEWALS_A_LEASE, self._sweep_every_s)
        super().__init__("leases", "keep leases", self._renew_and_sweep, period_s)

    def start(self) -> None:
        if self._redis_outlived_a_lease():
            self._try(self._sweep, self._sweeping)
        super().start()

    def age_s(self) -> float:
        """Seconds since Redis last took a renewal; at first, since the worker's start."""
        return time.monotonic() - self._renewed_s

    def _renew_and_sweep(self) -> None:
        began_s = time.monotonic()
        if self._try(self._renew, self._renewal) is not None:
            self._cut_off = True
            return
        now_s = time.monotonic()
        # An answer that took as long as a lease, retries included, came too late.
        if self._cut_off or now_s - began_s >= self._settings.lease_s:
            self._sweep_at_s = now_s + self._settings.lease_s
        self._cut_off = False
        if now_s >= self._sweep_at_s:
            self._sweep_at_s = now_s + self._sweep_every_s
            self._cut_off = isinstance(self._try(self._sweep, self._sweeping), _AWAY)

    def _try(self, act: Callable[[], None], outage: RedisOutage) -> RedisError | None:
        """Calls ``act``; logs and returns the error that it raised."""
        try:
            act()
        except RedisError as error:
            outage.failed(error)
            if isinstance(error, _AWAY):
                self._warn_if_draining()
            return error
        outage.over()
        return None

    def _warn_if_draining(self) -> None:
        if self._warned or state.should_stop is None or not len(HELD_CLAIMS):
            return
        self._warned = True
        logger.warning(
            "shutting down, but Redis is unreachable: %d jobs wait for it for at most %.0f s; "
            "then other workers take them over",
            len(HELD_CLAIMS),
            self._settings.drain_s,
        )

    def _redis_outlived_a_lease(self) -> bool:
        """Whether every live worker has had the time to renew; False if Redis does not say."""
        try:
            return bool(self._redis.info("server")["uptime_in_seconds"] > self._settings.lease_s)
        except RedisError:
            return False

    def _renew(self) -> None:
        held = HELD_CLAIMS.all()
        self._leases_exist = bool(held)
        if not held:
            # For the sweep, and to notice when Redis is away.
            self._leases_exist = bool(self._redis.exists(keys.LEASES))
        asked_s = time.monotonic()
        lost = claims.renew(self._redis, held, lease_ms=self._lease_ms) if held else []
        HELD_CLAIMS.note_renewed(set(held) - set(lost), asked_s)
        self._renewed_s = time.monotonic()
        for claim in lost:
            self._on_lost(claim)

    def _sweep(self) -> None:
        # Somewhat less, so that the worker that swept may do it again when its own time comes.
        lease = Lease(self._redis, keys.SWEPT, 0.9 * self._sweep_every_s)
        if not self._leases_exist or not lease.take():
            return
        try:
            self._return_jobs()
        except RedisError:
            with suppress(RedisError):
                lease.leave()
            raise

    def _return_jobs(self) -> None:
        swept = claims.sweep(self._redis, lease_ms=self._lease_ms)
        for job_id in swept:
            logger.warning(
                "the worker of job %s is gone; the job is queued again, or ends if this was its "
                "last attempt",
                job_id,
            )
