"""Listens to Redis for jobs that are cancelled while they run."""

from __future__ import annotations

import redis

from llorch_worker.broker import cancellation, keys
from llorch_worker.broker.connection import subscribe
from llorch_worker.broker.repeater import Repeater
from llorch_worker.worker.active_jobs import ActiveJobs

LISTEN_S = 0.2


class CancelListener(Repeater):
    """A thread that subscribes to the cancel channel.

    Messages on the channel are lost while the connection is down, but the cancel keys stay. The
    listener reads the keys of all active jobs after each (re)connect.
    """

    def __init__(self, client: redis.Redis, active_jobs: ActiveJobs) -> None:
        self._redis = client
        self._active_jobs = active_jobs
        super().__init__("cancel", "listen for cancels", self._listen)

    def _listen(self) -> None:
        with subscribe(self._redis, cancellation.channel(self._redis)) as pubsub:
            while not self.closing.is_set():
                match pubsub.get_message(timeout=LISTEN_S):
                    case {"type": "subscribe"}:
                        self._cancel_by_keys()
                        self.served()
                    case {"type": "message", "data": str(job_id)}:
                        self._active_jobs.cancel(job_id)

    def _cancel_by_keys(self) -> None:
        ids = self._active_jobs.ids()
        if not ids:
            return
        found = self._redis.mget([keys.cancel(job_id) for job_id in ids])
        for job_id, value in zip(ids, found, strict=True):
            if value is not None:
                self._active_jobs.cancel(job_id)
