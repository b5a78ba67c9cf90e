"""Hears of cancelled jobs from Redis while they run."""

from __future__ import annotations

import threading

import redis
from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.connection import subscribe
from llorch_worker.worker.active_jobs import ActiveJobs
from llorch_worker.worker.redis_outage import RedisOutage

logger = get_logger(__name__)

LISTEN_S = 0.2
RECONNECT_S = 0.5


class CancelListener:
    """A thread on the cancel channel.

    The channel forgets what nobody hears; the cancel keys do not. They are read after each
    (re)connect for the jobs that run, and by each job when it begins.
    """

    def __init__(self, client: redis.Redis, running: ActiveJobs) -> None:
        self._redis = client
        self._running = running
        self._outage = RedisOutage("cannot hear cancels", "hearing cancels again")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llorch-cancel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def is_cancelled(self, job_id: str) -> bool:
        """Whether a cancel was asked for before the job began. ``False`` where Redis is away: the
        listener looks again when it is back."""
        try:
            return bool(self._redis.exists(keys.cancel(job_id)))
        except RedisError as error:
            logger.warning("cannot ask whether job %s was cancelled: %s", job_id, error)
            return False

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except RedisError as error:
                self._outage.met(error)
                self._stop.wait(RECONNECT_S)

    def _listen(self) -> None:
        with subscribe(self._redis, keys.CANCEL_CHANNEL) as pubsub:
            while not self._stop.is_set():
                match pubsub.get_message(timeout=LISTEN_S):
                    case {"type": "subscribe"}:
                        self._cancel_marked()
                        self._outage.over()
                    case {"type": "message", "data": str(job_id)}:
                        self._running.cancel(job_id)

    def _cancel_marked(self) -> None:
        ids = self._running.ids()
        if not ids:
            return
        marks = self._redis.mget([keys.cancel(job_id) for job_id in ids])
        for job_id, mark in zip(ids, marks, strict=True):
            if mark is not None:
                self._running.cancel(job_id)
