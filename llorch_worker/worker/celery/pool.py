"""The Celery pool of threads that wait for the engine."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery.concurrency.base import BasePool
from celery.exceptions import BackendError, Reject
from celery.utils.log import get_logger
from celery.worker import state
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from llorch_worker.contract import InternalError, LlorchError, OutOfMemory
from llorch_worker.contract.frames import forget_frames
from llorch_worker.worker.active_jobs import ActiveJobs

logger = get_logger(__name__)

DRAIN_WAIT_S = 0.5

Callback = Callable[[Any], Any]


@dataclass(eq=False)
class _Work:
    pid: int
    task_id: str
    run: Callable[[], Any]
    on_accept: Callable[[int, float], Any]
    on_return: Callback
    on_error: Callback


class EnginePool(BasePool):  # type: ignore[misc]
    """Threads each of which waits for one job in the engine.

    ``limit`` is what ``inspect stats`` shows: claims alone bound how many jobs run at once.

    All of Celery's callbacks (accept, return, failure, and with them acks and events) run on the
    event loop's thread, which owns the kombu channel. A pool thread puts its outcome into
    ``_returned`` and makes a socket readable. It does not use ``Hub.call_soon``, with which the
    hub may wait up to a second before it sends the acks.

    Each task has its own integer id, which Celery calls its pid. ``terminate_job`` with that id
    cancels only that job. The pool never forks.
    """

    signal_safe = False
    body_can_be_buffer = True
    limit: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pids = itertools.count(1)
        self._running: dict[int, _Work] = {}
        self._inbox: SimpleQueue[_Work | None] = SimpleQueue()
        self._returned: deque[tuple[_Work, Callback, Any]] = deque()
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._has_returned = threading.Event()
        self.out_of_time = threading.Event()
        """Set when running jobs must leave."""
        self._deliver_lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._hub: Any = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self.active_jobs = ActiveJobs()
        self.figures: Callable[[], Mapping[str, Any]] = dict
        """Further figures for ``inspect stats``; set by the bootstep."""

    # Celery's life cycle ---------------------------------------------------------------------

    def register_with_event_loop(self, loop: Any) -> None:
        # Called again after each reconnect, because the loop then forgets its readers.
        self._hub = loop
        loop.add_reader(self._wake_reader, self._on_wake)

    def on_stop(self) -> None:
        """Warm shutdown: running jobs finish and are reported and acknowledged."""
        self.drain()
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._hub is not None:
            self._hub.remove_reader(self._wake_reader)
            self._hub = None
        self._wake_reader.close()
        self._wake_writer.close()

    def stop(self) -> None:
        """Waits for running jobs, unless a cold shutdown has begun.

        Celery then calls this inside its signal handler. What the signal interrupted may hold a
        lock that the jobs' threads need, or be about to give them a job, so that waiting here could
        last for ever. Celery calls ``terminate`` at its loop's next iteration, which this ends.
        """
        if not state.should_terminate:
            super().stop()
            return
        self._state = self.CLOSE
        self.wake()

    def on_terminate(self) -> None:
        """Cold shutdown: running jobs go back to their queues."""
        self._hand_back_all()
        self.on_stop()

    def wake(self) -> None:
        """Ends the event loop's wait, which a signal alone does not do. Thread-safe."""
        # A full socket already wakes the loop, which then reads everything; a pool that has stopped
        # has closed its own.
        with suppress(OSError):
            self._wake_writer.send(b"\0")

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls ``function`` on the event loop's thread. Thread-safe."""
        self._calls.put(function)
        self.wake()

    def _hand_back_all(self) -> None:
        self.out_of_time.set()
        self.hand_back_running()

    def hand_back_running(self, ids: Collection[str] | None = None) -> None:
        """Stops the jobs that run now, all or these; they return to their queues."""
        for work in tuple(self._running.values()):
            if ids is None or work.task_id in ids:
                self.active_jobs.hand_back(work.task_id)

    def drain(self, grace_s: float | None = None) -> None:
        """Waits for running jobs and runs the event loop for their callbacks, because Celery no
        longer does. Jobs that run longer than ``grace_s`` are handed back to their queues.

        Running the loop here also hands back a job that was popped at the last moment, and sends
        heartbeats.
        """
        # A cold shutdown may have interrupted an iteration of the loop.
        loops = self._hub is not None and not state.should_terminate
        if loops:
            # A loop that ended with an error has forgotten its readers.
            self.register_with_event_loop(self._hub)
        give_up_s = None if grace_s is None else time.monotonic() + grace_s
        while self._running:
            if give_up_s is not None and time.monotonic() > give_up_s:
                give_up_s = None
                self._hand_back_all()
            if loops:
                loops = self._run_hub()
            else:
                self._has_returned.wait(DRAIN_WAIT_S)
            self._deliver()

    def _run_hub(self) -> bool:
        try:
            self._hub.run_once()
        except Exception as error:  # noqa: BLE001 - jobs must end even if the loop breaks
            # A cold shutdown that began meanwhile closes its connections.
            if not state.should_terminate:
                logger.warning("the event loop broke while draining: %s", type(error).__name__)
            return False
        return True

    # Work ------------------------------------------------------------------------------------

    def apply_async(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        callback: Callback,
        error_callback: Callback,
        accept_callback: Callable[[int, float], Any],
        correlation_id: str,
        **_: Any,
    ) -> None:
        """Runs ``target`` in a thread and always calls one of the callbacks.

        Replaces the base method, which logs ``args`` (including the prompt) at debug level.
        """
        work = _Work(
            pid=next(self._pids),
            task_id=correlation_id,
            run=partial(target, *args, **(kwargs or {})),
            on_accept=accept_callback,
            on_return=callback,
            on_error=error_callback,
        )
        with self._deliver_lock:
            if self._state == self.RUN:
                self._begin(work)
            else:
                self._refuse(work)

    def terminate_job(self, pid: int, _signal: int | None = None) -> None:
        """Cancels the job that was accepted as ``pid``, for any signal."""
        work = self._running.get(pid)
        if work is not None:
            self.active_jobs.cancel(work.task_id)

    def hand_back_job(self, pid: int) -> None:
        """Stops the job that was accepted as ``pid``; it returns to its queue."""
        work = self._running.get(pid)
        if work is not None:
            self.active_jobs.hand_back(work.task_id)

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info() | {
            "processes": [os.getpid()],
            "running-jobs": len(self._running),
        }
        return info | dict(self.figures())

    # On the event loop's thread --------------------------------------------------------------

    def _begin(self, work: _Work) -> None:
        self._running[work.pid] = work
        self.active_jobs.expect(work.task_id)
        try:
            if len(self._threads) < len(self._running):
                try:
                    self._start_thread()
                except RuntimeError:
                    # As many as a limit allows; one of them takes it later.
                    if not self._threads:
                        raise
            # Before the task runs and on this thread, so that a revoke finds the job from now on.
            work.on_accept(work.pid, time.monotonic())
        except Exception as error:  # noqa: BLE001 - what is not handed over must be settled
            logger.error("job %s was not accepted: %s", work.task_id, type(error).__name__)
            del self._running[work.pid]
            self.active_jobs.forget(work.task_id)
            self._refuse(work)
        else:
            self._inbox.put(work)

    def _start_thread(self) -> None:
        # Daemons, because a hard shutdown must not wait for a job that hangs.
        name = f"llorch-slot-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _refuse(self, work: _Work) -> None:
        refusal = Reject("the worker did not begin the job", requeue=True)
        self._call(work, work.on_error, _info_of(refusal))

    def _on_wake(self) -> None:
        with suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        self._deliver()
        while not self._calls.empty():
            self._calls.get()()

    def _deliver(self) -> None:
        with self._deliver_lock:
            self._has_returned.clear()
            while self._returned:
                self._report(*self._returned.popleft())

    def _report(self, work: _Work, callback: Callback, value: Any) -> None:
        del self._running[work.pid]
        self.active_jobs.forget(work.task_id)
        self._call(work, callback, value)

    def _call(self, work: _Work, callback: Callback, value: Any) -> None:
        """Runs the callback. If it fails, reports the failure instead, so that the job ends."""
        try:
            callback(value)
        except Exception as error:
            logger.exception("the callback of job %s failed", work.task_id)
            failure = InternalError(f"the worker could not report the job: {type(error).__name__}")
            try:
                work.on_error(_info_of(failure))
            except Exception:
                logger.exception(
                    "job %s stays unacknowledged; it will be redelivered", work.task_id
                )

    # On a thread of the pool -----------------------------------------------------------------

    def _serve(self) -> None:
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """In a call of its own, so that a thread that waits for work keeps nothing of the last."""
        if (work := self._inbox.get()) is None:
            return False
        callback, value = self._run(work)
        self._returned.append((work, callback, value))
        self._has_returned.set()
        self.wake()
        return True

    def _run(self, work: _Work) -> tuple[Callback, Any]:
        try:
            value = work.run()
        except BaseException as error:  # noqa: BLE001 - any error must be reported to Celery
            info = _info_of(_reportable(error))
            forget_frames(error)
            return work.on_error, info
        match value:
            # What Celery's tracer returns of a task that failed, or that it shall ignore.
            case (_, ExceptionInfo(exception=error), _):
                forget_frames(error.exc if isinstance(error, ExceptionWithTraceback) else error)
        return work.on_return, value


def _reportable(error: BaseException) -> Exception:
    """The error to report for an exception that escaped Celery's tracing of the task."""
    match error:
        case LlorchError() | Reject():
            known: Exception = error
            return known
        case BackendError() | OperationalError() | RedisError():
            # The result could not be stored, so the job has not ended.
            reason = f"its result could not be stored: {type(error).__name__}"
            requeued: Exception = Reject(reason, requeue=True)
            return requeued
        case MemoryError():
            return OutOfMemory("the worker ran out of memory in this job")
    return InternalError(f"{type(error).__name__} escaped the task")


def _info_of(error: Exception) -> ExceptionInfo:
    try:
        # Without the cause, whose message may quote the prompt.
        raise error from None
    except type(error):
        return ExceptionInfo(sys.exc_info())
    finally:
        forget_frames(error)
