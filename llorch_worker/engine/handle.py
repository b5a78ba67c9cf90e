"""What the submitter of a request keeps, wherever the engine runs. Imports no torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic

from llorch_worker.contract import (
    Cancelled,
    CancelledEvent,
    Choice,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    GenerationResult,
    LlorchError,
    Started,
    Timings,
    Usage,
)
from llorch_worker.contract.events import TERMINAL_EVENTS
from llorch_worker.contract.kinds import Asked, Result
from llorch_worker.engine.told import TokensTold

logger = logging.getLogger(__name__)


class GenerationHandle(Generic[Asked, Result]):
    """The events and the one result of a request. Any thread may call the public methods."""

    def __init__(
        self,
        id: str,
        request: Asked,
        on_event: Callable[[Event], None] | None,
        on_tokens: Callable[[TokensTold], None] | None = None,
    ) -> None:
        """``on_tokens`` takes new tokens in place of ``on_event``."""
        self.id = id
        self.request = request
        self._on_event = on_event
        self._on_tokens = on_tokens
        self.is_read = on_tokens is None
        """Whether somebody reads its tokens as they come."""
        self._changed = threading.Condition()
        self._readers = 0
        """How many threads wait for events: most often none does."""
        self._events: list[Event | TokensTold] = []
        self._error: LlorchError | None = None
        # Separate from the events, because a token must not wake threads that wait for results.
        self._finished = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the terminal event has been emitted."""
        return self._finished.is_set()

    def events(self) -> Iterator[Event]:
        """All events from the first on, as they arrive; ends after the terminal event.

        Every call reads from the beginning. Raises ``RuntimeError`` if ``on_event`` has taken them:
        a token's event is 0.7 KB, of which a worker would keep those of all running jobs.
        """
        if self._on_event is not None:
            raise RuntimeError("the events go to on_event, and are not kept")
        return self._kept_events()

    def _kept_events(self) -> Iterator[Event]:
        index = 0
        while True:
            if len(self._events) == index:
                with self._changed:
                    self._readers += 1
                    while len(self._events) == index:
                        self._changed.wait()
                    self._readers -= 1
            fresh = self._events[index:]
            for each in fresh:
                event = each.event() if isinstance(each, TokensTold) else each
                yield event
                if isinstance(event, TERMINAL_EVENTS):
                    return
            index += len(fresh)

    def cancel(self) -> None:
        """Asks the engine to stop within one step. Does nothing once the generation is done."""
        if not self.done:
            self._request_cancel()

    def result(self, timeout: float | None = None) -> Result:
        """Waits for the result and returns it.

        Raises:
            TimeoutError: no result after ``timeout`` seconds; the generation continues.
            LlorchError: the generation failed; ``Cancelled`` if it was cancelled.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"generation {self.id} has no result after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._read_result()

    def note_read(self, is_read: bool) -> None:
        """Notes whether somebody reads its tokens as they come. While nobody does, they may wait
        for each other. Those that go to ``on_tokens`` are read by nobody until this is called."""
        self.is_read = is_read

    # Its engine's side -----------------------------------------------------------------------

    def _request_cancel(self) -> None:
        raise NotImplementedError

    def _read_result(self) -> Result:
        """Called by the threads that wait for it."""
        raise NotImplementedError

    def _emit(self, event: Event) -> None:
        if self._on_event is None:
            self._keep(event)
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("the event callback of job %s failed; it is cancelled", self.id)
            self.cancel()

    # Not an attribute that is one of its methods: that would keep each generation, and the vectors
    # of each job of texts, until Python collects cycles, of which an engine makes few.
    def _tell_tokens(self, told: TokensTold) -> None:
        if self._on_tokens is not None:
            self._on_tokens(told)
        elif self._on_event is None:
            self._keep(told)
        else:
            self._emit(told.event())

    def _keep(self, event: Event | TokensTold) -> None:
        self._events.append(event)
        # Whoever begins to wait from now on looks first.
        if self._readers:
            with self._changed:
                self._changed.notify_all()


class ComputedGeneration(GenerationHandle[Asked, Result]):
    """One that is computed for this process: what its events and its result say of the job, of the
    worker and of the time. Its engine's thread calls what :class:`.GenerationHandle` has not."""

    def __init__(
        self,
        id: str,
        request: Asked,
        *,
        model_name: str,
        fingerprint: str = "",
        arithmetic: str = "",
        earlier_arithmetic: tuple[str, ...] = (),
        worker: str = "local",
        attempt: int = 1,
        queued_at: float | None = None,
        retried_at: float | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_tokens: Callable[[TokensTold], None] | None = None,
    ) -> None:
        """``queued_at``: unix time in s at which the job was enqueued, if known; ``retried_at``:
        and enqueued once more."""
        super().__init__(id, request, on_event, on_tokens)
        self._model_name = model_name
        self._fingerprint = fingerprint
        self._arithmetic = arithmetic
        self._earlier_arithmetic = earlier_arithmetic
        self._worker = worker
        self._attempt = attempt
        # Durations use the monotonic clock; the wall clock is read only here.
        now, ahead_s = time.monotonic(), time.time() - time.monotonic()
        enqueued_s = now if queued_at is None else min(now, queued_at - ahead_s)
        self._queued_s = enqueued_s if retried_at is None else min(now, retried_at - ahead_s)
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self.deadline_s = None if request.deadline_s is None else enqueued_s + request.deadline_s
        self._result: Result | None = None

    @property
    def is_checked(self) -> bool:
        """Whether the first thread that reads the result checks it, which may take seconds."""
        return False

    def fail(self, error: LlorchError) -> None:
        """Ends with ``error``."""
        self._error = error
        self._emit(Failed(error=error.document()))

    def stop_cancelled(self, error: Cancelled) -> None:
        """Ends as cancelled."""
        if self._started_s is not None:
            error.spent = self._usage(), self._timings(time.monotonic())
        self._error = error
        self._emit(CancelledEvent())

    def _usage(self) -> Usage:
        raise NotImplementedError

    def _read_result(self) -> Result:
        assert self._result is not None
        return self._result

    def _emit(self, event: Event) -> None:
        super()._emit(event)
        if isinstance(event, TERMINAL_EVENTS):
            self._finished.set()

    def _emit_started(self, prompt_tokens: int, cached_tokens: int = 0) -> None:
        assert self._started_s is not None
        self._emit(
            Started(
                worker=self._worker,
                model=self._model_name,
                model_fingerprint=self._fingerprint,
                arithmetic=self._arithmetic,
                attempt=self._attempt,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                queue_ms=(self._started_s - self._queued_s) * 1e3,
            )
        )

    def _finish_with(self, choices: tuple[Choice, ...], seed: int, now_s: float) -> None:
        usage, timings = self._usage(), self._timings(now_s)
        assert isinstance(self.request, GenerationRequest)
        result: Any = GenerationResult(
            choices=choices,
            seed=seed,
            generation_config=self.request.taken_config or None,
            **self._of_job(usage, timings),
        )
        self._result = result
        self._emit(Finished(finish_reason=choices[0].finish_reason, usage=usage, timings=timings))

    def _of_job(self, usage: Usage, timings: Timings) -> dict[str, Any]:
        """What the results of all tasks say."""
        return {
            "id": self.id,
            "model": self._model_name,
            "model_fingerprint": self._fingerprint,
            "arithmetic": tuple(dict.fromkeys((*self._earlier_arithmetic, self._arithmetic))),
            "usage": usage,
            "timings": timings,
            "worker": self._worker,
            "attempts": self._attempt,
            "metadata": self.request.metadata,
        }

    def _timings(self, now_s: float) -> Timings:
        started = now_s if self._started_s is None else self._started_s
        first = now_s if self._first_token_s is None else self._first_token_s
        return Timings(
            queue_ms=(started - self._queued_s) * 1e3,
            prefill_ms=(first - started) * 1e3,
            first_token_ms=(first - self._queued_s) * 1e3,
            decode_ms=(now_s - first) * 1e3,
        )
