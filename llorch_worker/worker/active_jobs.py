"""The jobs that this worker is running or about to run, and who hears that they are cancelled."""

from __future__ import annotations

import threading
from typing import Protocol

import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import subscribe
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.jobs import cancellation
from llorch_worker.broker.jobs.claims import Claim

LISTEN_S = 0.2


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class ActiveJob:
    """One delivery of a job, from its arrival to its end.

    It can be stopped before its generation exists: the generation is then cancelled on arrival.
    """

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.claim: Claim | None = None
        """Set when its thread starts it."""
        self.stopped = False
        self.handed_back = False
        """Whether the job was stopped to run again elsewhere."""
        self.leaving = False
        """Whether a hand-back was requested, even after a cancel; the job's end then does not wait
        for Redis."""
        self._generation: Cancellable | None = None
        # Reentrant: a signal handler may hand jobs back while its thread holds the lock.
        self._lock = threading.RLock()

    def attach(self, generation: Cancellable) -> None:
        """Gives the job its generation."""
        with self._lock:
            self._generation = generation
            stopped = self.stopped
        if stopped:
            generation.cancel()

    def cancel(self) -> None:
        """Ends the job, unless it has been handed back."""
        self._stop(hand_back=False)

    def hand_back(self) -> None:
        """Stops the job to run again elsewhere, unless it has been cancelled."""
        self._stop(hand_back=True)

    def _stop(self, *, hand_back: bool) -> None:
        with self._lock:
            self.leaving = self.leaving or hand_back
            if not self.stopped:
                self.stopped, self.handed_back = True, hand_back
            generation = self._generation
        if generation is not None:
            generation.cancel()


class ActiveJobs:
    """All active jobs. Thread-safe.

    A job is expected from the moment that the pool accepts it, because it may then be cancelled.
    It enters when its thread starts it. A job whose claim was lost may be delivered here again
    before its first run has ended; the two are here side by side.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, list[ActiveJob]] = {}
        self._leaving = False
        # Reentrant, like the lock of a job.
        self._changed = threading.Condition(threading.RLock())

    def expect(self, job_id: str) -> None:
        """Announces a delivery that a thread will soon enter."""
        with self._changed:
            self._add(job_id)

    def forget(self, job_id: str) -> None:
        """Drops a delivery that was expected but never entered."""
        with self._changed:
            job = self._expected(job_id)
            if job is not None:
                self._remove(job)

    def enter(self, claim: Claim) -> ActiveJob:
        """The delivery under ``claim``, once it runs alone.

        A second claim means that the first was lost. Its run is stopped, and this waits until it
        has left, so that two runs never write to one stream.
        """
        with self._changed:
            job = self._expected(claim.job_id) or self._add(claim.job_id)
            job.claim = claim
            for other in self._jobs[job.id]:
                if other.claim is not None and other is not job:
                    # Their threads may come in any order.
                    (other if other.claim.fence < claim.fence else job).hand_back()
            self._changed.wait_for(lambda: not self._follows(job, claim))
            return job

    def leave(self, job: ActiveJob) -> None:
        with self._changed:
            self._remove(job)
            self._changed.notify_all()

    def cancel(self, job_id: str) -> None:
        """Cancels the job within one engine step, if it is here."""
        for job in self._deliveries(job_id):
            job.cancel()

    def hand_back(self, job_id: str) -> None:
        """Stops the job, if it is here, to run again elsewhere."""
        for job in self._deliveries(job_id):
            job.hand_back()

    def lose(self, claim: Claim) -> None:
        """Stops the run under a claim that was lost, but no run under a newer claim."""
        for job in self._deliveries(claim.job_id):
            if job.claim is claim:
                job.hand_back()

    def hand_back_all(self) -> None:
        """Hands back every job, including those that arrive from now on."""
        with self._changed:
            self._leaving = True
            jobs = [job for deliveries in self._jobs.values() for job in deliveries]
        for job in jobs:
            job.hand_back()

    def ids(self) -> list[str]:
        with self._changed:
            return list(self._jobs)

    def _deliveries(self, job_id: str) -> list[ActiveJob]:
        with self._changed:
            return list(self._jobs.get(job_id, ()))

    def _expected(self, job_id: str) -> ActiveJob | None:
        return next((job for job in self._jobs.get(job_id, ()) if job.claim is None), None)

    def _follows(self, job: ActiveJob, claim: Claim) -> bool:
        """Whether an earlier run of the job is still here."""
        claims = [other.claim for other in self._jobs[job.id] if other.claim is not None]
        return any(other.fence < claim.fence for other in claims)

    def _add(self, job_id: str) -> ActiveJob:
        job = ActiveJob(job_id)
        self._jobs.setdefault(job_id, []).append(job)
        if self._leaving:
            job.hand_back()
        return job

    def _remove(self, job: ActiveJob) -> None:
        self._jobs[job.id].remove(job)
        if not self._jobs[job.id]:
            del self._jobs[job.id]


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
