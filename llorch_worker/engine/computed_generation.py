"""A generation that is computed for this process. Imports no torch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from llorch_worker.contract import (
    Cancelled,
    CancelledEvent,
    Choice,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    GenerationResult,
    Journal,
    LlorchError,
    Started,
    Timings,
    Usage,
)
from llorch_worker.contract.events import TERMINAL_EVENTS
from llorch_worker.contract.kinds import Asked, Result
from llorch_worker.engine.handle import GenerationHandle
from llorch_worker.engine.interface import ModelFacts
from llorch_worker.engine.told import TokensTold


class ComputedGeneration(GenerationHandle[Asked, Result]):
    """What its events and its result say of the job, of the worker and of the time. Its engine's
    thread calls what :class:`.GenerationHandle` has not."""

    def __init__(
        self,
        request: Asked,
        facts: ModelFacts,
        *,
        job_id: str | None = None,
        worker: str = "local",
        attempt: int = 1,
        queued_at: float | None = None,
        retried_at: float | None = None,
        journal: Journal | None = None,
        suspect: bool = False,
        on_event: Callable[[Event], None] | None = None,
        on_tokens: Callable[[TokensTold], None] | None = None,
        handle: int = 0,
    ) -> None:
        """``facts``: of the model that computes it. The others are an :class:`.Attempt`."""
        super().__init__(job_id or str(uuid.uuid4()), request, on_event, on_tokens)
        self.handle = handle
        self.suspect = suspect
        self._facts = facts
        self._earlier_arithmetic = journal.arithmetic if journal else ()
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
                model=self._facts.model_name,
                model_fingerprint=self._facts.fingerprint,
                arithmetic=self._facts.arithmetic,
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
            "model": self._facts.model_name,
            "model_fingerprint": self._facts.fingerprint,
            "arithmetic": tuple(dict.fromkeys((*self._earlier_arithmetic, self._facts.arithmetic))),
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
