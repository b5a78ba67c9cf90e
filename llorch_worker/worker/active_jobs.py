"""The jobs that this worker is running or about to run, by id."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Protocol

from llorch_worker.contract import GenerationResult


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class ActiveJob:
    """One job from its arrival to its end.

    It can be stopped before its generation exists: the generation is then cancelled on arrival.
    """

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.entered = False
        self.outcome: Future[GenerationResult] = Future()
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
    It enters when its thread starts it.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, ActiveJob] = {}
        self._leaving = False
        self._lock = threading.RLock()

    def expect(self, job_id: str) -> None:
        """Announces a job that a thread will soon enter."""
        with self._lock:
            self._get_or_add(job_id)

    def forget(self, job_id: str) -> None:
        """Drops a job that was expected but never entered."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None and not job.entered:
                del self._jobs[job_id]

    def enter(self, job_id: str) -> tuple[ActiveJob, bool]:
        """The job, and whether it is new. If its message is delivered twice, the second delivery
        is not new and waits for the outcome of the first."""
        with self._lock:
            job = self._get_or_add(job_id)
            new = not job.entered
            job.entered = True
            return job, new

    def leave(self, job: ActiveJob) -> None:
        with self._lock:
            del self._jobs[job.id]

    def cancel(self, job_id: str) -> None:
        """Cancels the job within one engine step, if it is here."""
        if job := self._jobs.get(job_id):
            job.cancel()

    def hand_back(self, job_id: str) -> None:
        """Stops the job, if it is here, to run again elsewhere."""
        if job := self._jobs.get(job_id):
            job.hand_back()

    def hand_back_all(self) -> None:
        """Hands back every job, including those that arrive from now on."""
        with self._lock:
            self._leaving = True
            jobs = list(self._jobs.values())
        for job in jobs:
            job.hand_back()

    def ids(self) -> list[str]:
        with self._lock:
            return list(self._jobs)

    def _get_or_add(self, job_id: str) -> ActiveJob:
        job = self._jobs.get(job_id)
        if job is None:
            job = self._jobs[job_id] = ActiveJob(job_id)
            if self._leaving:
                job.hand_back()
        return job
