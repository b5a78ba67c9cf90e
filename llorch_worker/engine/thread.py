"""The one thread that runs the engine; other threads reach it through an inbox."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sized
from concurrent.futures import Future
from typing import Any, Generic, Protocol, Self, TypeVar, Unpack

import torch

from llorch_worker.allocator import return_freed_memory
from llorch_worker.contract import AnyTextsRequest, InternalError, LlorchError, check_task
from llorch_worker.engine.interface import Attempt, ModelFacts, StepFigures
from llorch_worker.engine.stats import Counters
from llorch_worker.engine.texts_generation import TextsGeneration
from llorch_worker.intake.request_checks import check_model
from llorch_worker.intake.texts import PreparedTexts, prepare_texts
from llorch_worker.model.encoder import Pooling
from llorch_worker.processes.board import Board
from llorch_worker.text import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Job = TypeVar("Job", bound="AnyJob")
JobIn = TypeVar("JobIn", bound="AnyJob", contravariant=True)

TIDY_AFTER_S = 10.0
"""An engine that has been idle for this long checks its KV blocks and returns the memory of its
steps, once. A job that arrives meanwhile waits, and the next steps must get their memory again, so
this must not come between jobs that follow each other closely."""
_BROKEN = "the engine broke down; restart the worker"


class Outlet(Protocol):
    """Who passes on what generations tell. Called on the engine's thread."""

    def turned(self) -> None:
        """A step, or what came in between two, has told its last event. It may wait, and then no
        step begins; and while steps follow each other it may keep what tokens were told."""

    def hurry(self) -> None:
        """The next step may take long: it computes a prompt."""

    def broken(self, error: BaseException) -> None:
        """The thread dies of ``error``. The running generations have not failed yet."""


class Core(Protocol[JobIn]):
    """The steps of an engine. Its thread alone calls it."""

    @property
    def has_work(self) -> bool: ...

    @property
    def prefills_next(self) -> bool:
        """Whether the next step may take long."""

    def add(self, generation: JobIn, /) -> None: ...

    def cancel(self, generation: JobIn, /) -> None: ...

    def cancel_all(self, reason: str) -> None: ...

    def fail_all(self, error: LlorchError) -> None:
        """Ends all after a crash."""

    def check_integrity(self) -> None:
        """Raises if an invariant is broken, between two steps."""

    def step(self) -> StepDone: ...


class StepDone(Protocol):
    """What a step computed."""

    @property
    def chunks(self) -> Sized:
        """Empty if nothing could be scheduled."""


class AnyJob(Protocol):
    """What an engine's thread knows of a generation."""

    def fail(self, error: LlorchError) -> None: ...


class ThreadedEngine:
    """What each engine with an :class:`EngineThread` does in the same way."""

    facts: ModelFacts
    tokenizer: Tokenizer
    pooling: Pooling | None
    """How vectors are made of texts; None if it makes none."""
    _thread: EngineThread[Any]
    _board: Board
    _counters: Counters

    def _submit_texts(
        self, request: AnyTextsRequest | PreparedTexts, **attempt: Unpack[Attempt]
    ) -> TextsGeneration:
        """See :meth:`.EmbeddingEngine.submit`."""
        if not isinstance(request, PreparedTexts):
            check_model(request, self.facts.model_name)
            check_task(request, self.facts.model_name, self.facts.tasks)
            request = prepare_texts(request, self.tokenizer, self.facts.limits)
        generation = TextsGeneration(
            request,
            self.facts,
            normalizes=self.pooling is not None and self.pooling.normalize,
            request_cancel=self._thread.cancel,
            **attempt,
        )
        self._thread.add(generation)
        return generation

    def step_figures(self) -> StepFigures:
        """See :meth:`.EngineInterface.step_figures`."""
        return self._counters.steps.read()

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread runs; False after :meth:`close` or a crash."""
        return self._thread.healthy

    def stalled_for_s(self) -> float:
        """Seconds without a sign of life, for a watchdog; 0.0 while idle.

        The value grows while a step, an event callback or a call hangs, and for ever after a crash.
        """
        return self._board.stalled_for_s()

    def close(self) -> None:
        """Cancels running jobs and ends the thread; a second call does nothing."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EngineThread(Generic[Job]):
    """Runs steps while there is work and sleeps on a condition while there is none.

    It empties the inbox before every step.
    """

    def __init__(
        self,
        core: Core[Job],
        name: str,
        begin: Callable[[], None] | None = None,
        *,
        board: Board,
        outlet: Outlet | None = None,
    ) -> None:
        """The new thread calls ``begin`` first, to set up its device."""
        self._core = core
        self._begin = begin
        self._board = board
        self._outlet = outlet
        self._wake = threading.Condition()
        self._arrivals: list[Job] = []
        self._cancels: list[Job] = []
        self._calls: list[tuple[Callable[[], None], Future[Any]]] = []
        self._adding: list[Job] = []
        self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return not (self._broken or self._closing)

    def add(self, generation: Job) -> None:
        """Queues a generation. Raises ``InternalError`` when the engine is closed or broken."""
        with self._wake:
            self._require_open()
            self._arrivals.append(generation)
            self._wake.notify()

    def cancel(self, generation: Job) -> None:
        """Cancels before the next step; safe from any thread, the engine's own included."""
        with self._wake:
            self._cancels.append(generation)
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> T:
        """Runs ``function`` on the engine's thread between two steps and returns its result."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("an event callback must not wait for the engine that calls it")
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                logger.debug("a call on the engine thread failed", exc_info=True)
                future.set_exception(error)

        with self._wake:
            self._require_open()
            self._calls.append((answer, future))
            self._wake.notify()
        return future.result()

    def close(self) -> None:
        """Cancels all generations and ends the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _require_open(self) -> None:
        if self._broken:
            raise InternalError(_BROKEN)
        if self._closing:
            raise InternalError("the engine is closed")

    def _run(self) -> None:
        try:
            if self._begin is not None:
                self._begin()
            with torch.inference_mode():
                while self._take_inbox():
                    if self._core.has_work:
                        self._step()
                    if self._outlet is not None:
                        self._outlet.turned()
            self._core.cancel_all("the engine was closed")
            self._board.rest()
            if self._outlet is not None:
                self._outlet.turned()
        except BaseException as error:
            logger.exception("the engine thread died; all its jobs fail")
            if self._outlet is not None:
                self._outlet.broken(error)
            self._break_down()

    def _break_down(self) -> None:
        with self._wake:
            self._broken = True
            stranded = [*self._adding, *self._arrivals]
            calls = self._calls
        error = InternalError(_BROKEN)
        self._core.fail_all(error)
        for generation in stranded:
            generation.fail(error)
        for _, future in calls:
            future.set_exception(error)

    def _step(self) -> None:
        if self._outlet is not None and self._core.prefills_next:
            self._outlet.hurry()
        plan = self._core.step()
        if not plan.chunks and self._core.has_work:
            raise RuntimeError("there is work, but none of it can be scheduled")

    def _take_inbox(self) -> bool:
        """Waits for work, then empties the inbox; False when the engine shuts down."""
        if not self._wait_for_work(TIDY_AFTER_S):
            # A broken invariant ends the thread: no job may run on top of it.
            self._board.beat()
            self._core.check_integrity()
            return_freed_memory()
            self._wait_for_work()
        with self._wake:
            self._board.beat()
            self._adding, self._arrivals = self._arrivals, []
            cancels, self._cancels = self._cancels, []
            closing = self._closing
        while self._adding:
            self._core.add(self._adding.pop(0))
        for generation in cancels:
            self._core.cancel(generation)
        while self._calls:
            answer, _ = self._calls.pop(0)
            answer()
        return not closing

    def _wait_for_work(self, timeout_s: float | None = None) -> bool:
        """Returns whether there is work, after ``timeout_s`` at the latest."""
        with self._wake:
            if not self._wanted():
                self._board.rest()
                self._board.launch(())
            return self._wake.wait_for(self._wanted, timeout_s)

    def _wanted(self) -> bool:
        return bool(
            self._arrivals or self._cancels or self._calls or self._closing or self._core.has_work
        )
