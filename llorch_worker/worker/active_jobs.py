"""The jobs that this worker holds right now, by id."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Protocol

from llorch_worker.contract import GenerationResult


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class ActiveJob:
    """One job between its arrival and its end.

    A cancel may come before the generation exists; it is kept and takes effect when it does.
    """

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.entered = False
        self.outcome: Future[GenerationResult] = Future()
        self.cancelled = False
        self.handed_back = False
        self.leaving = False
        self._generation: Cancellable | None = None
        # Reentrant: a signal handler may hand jobs back while its thread is in here.
        self._lock = threading.RLock()

    def attach(self, generation: Cancellable) -> None:
        """Gives the job its generation."""
        with self._lock:
            self._generation = generation
            stop = self.cancelled
        if stop:
            generation.cancel()

    def cancel(self, *, hand_back: bool = False) -> None:
        """Stops the generation; with ``hand_back`` the job has not ended by that."""
        with self._lock:
            # Whoever asked first is obeyed: a cancelled job does not come back.
            self.handed_back = hand_back if not self.cancelled else self.handed_back
            # Whatever its end would be, this worker does not wait for Redis to tell it.
            self.leaving = self.leaving or hand_back
            self.cancelled = True
            generation = self._generation
        if generation is not None:
            generation.cancel()


class ActiveJobs:
    """All of them; any thread may ask.

    A job is known from the moment the pool accepts it, because from then on somebody may want it
    cancelled; it enters when its thread gets to it.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, ActiveJob] = {}
        self._lock = threading.RLock()

    def expect(self, job_id: str) -> None:
        """Makes a job known that a thread will soon enter."""
        with self._lock:
            self._jobs.setdefault(job_id, ActiveJob(job_id))

    def forget(self, job_id: str) -> None:
        """Drops a job that was expected and never entered."""
        with self._lock:
            known = self._jobs.get(job_id)
            if known is not None and not known.entered:
                del self._jobs[job_id]

    def enter(self, job_id: str) -> tuple[ActiveJob, bool]:
        """The job of this id and whether it is new. It is not where the same message was delivered
        twice: then the second waits for the outcome of the first."""
        with self._lock:
            job = self._jobs.setdefault(job_id, ActiveJob(job_id))
            new = not job.entered
            job.entered = True
            return job, new

    def leave(self, job: ActiveJob) -> None:
        with self._lock:
            del self._jobs[job.id]

    def cancel(self, job_id: str) -> None:
        """Cancels the job if it is here."""
        job = self._find(job_id)
        if job is not None:
            job.cancel()

    def hand_back(self, job_id: str) -> None:
        """Stops the job if it is here; it is to run again, elsewhere."""
        job = self._find(job_id)
        if job is not None:
            job.cancel(hand_back=True)

    def ids(self) -> list[str]:
        with self._lock:
            return list(self._jobs)

    def _find(self, job_id: str) -> ActiveJob | None:
        with self._lock:
            return self._jobs.get(job_id)
