"""Loads the worker's engine: once at the start, and again after each death of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from celery.utils.log import get_logger
from celery.worker import state

from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.token_questions import TokenQuestion
from llorch_worker.engine.process.engine_process import ENGINE, EngineProcess
from llorch_worker.intake.process import IntakeProcess
from llorch_worker.model_files.hub import local_path
from llorch_worker.settings import Settings
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.residency_check import violation, wrong_card

logger = get_logger(__name__)

PROGRESS_INTERVAL_S: Final = 5.0
MIB: Final = 2**20


class EngineLoader:
    """Makes engines that are alike, ready for jobs. A shutdown of the worker ends a load."""

    def __init__(
        self,
        settings: Settings,
        assignment: Assignment,
        *,
        engine_class: str,
        max_sequences: int,
        report: Callable[[str], None],
    ) -> None:
        """``engine_class``: see :meth:`.EngineProcess.load`. ``report`` gets a line at the
        beginning of a load and every few seconds."""
        self._settings = settings
        self._assignment = assignment
        self._engine_class = engine_class
        self._max_sequences = max_sequences
        self._report = report
        self._starting = threading.Lock()
        self._intake: IntakeProcess | None = None

    def intake(self) -> IntakeProcess:
        """One for all engines, started when it is first needed. Raises ModelLoadFailed if the model
        cannot be downloaded."""
        with self._starting:
            if self._intake is None:
                self._intake = IntakeProcess(local_path(self._settings.model))
            return self._intake

    def answer(self, question: TokenQuestion) -> dict[str, Any]:
        """See :meth:`.IntakeProcess.answer`."""
        return self.intake().answer(question)

    def close(self) -> None:
        """Ends the intake."""
        if self._intake is not None:
            self._intake.close()

    def load(self, listener: Callable[[int, int], None] | None = None) -> EngineProcess:
        """Loads and warms up; ``listener`` gets the bytes loaded and the bytes in total.

        Raises:
            ModelLoadFailed: the model cannot be loaded, or is not where it should be.
            EngineDied: the process died meanwhile.
        """
        settings, assignment = self._settings, self._assignment
        self._report(f"loading {settings.served_name}")
        engine = EngineProcess.load(
            settings.model,
            settings.engine_options,
            model_name=settings.served_name,
            progress=self._progress(listener),
            engine_class=self._engine_class,
            # Another class, for tests, takes requests as they are.
            intake=self.intake() if self._engine_class == ENGINE else None,
            kept=() if assignment.lock is None else (assignment.lock,),
            device=assignment.device,
            max_sequences=self._max_sequences,
            watchdog_s=settings.watchdog_s,
            meanwhile=state.maybe_shutdown,
        )
        try:
            engine.warm_up()
            fault = wrong_card(engine.facts, assignment) or violation(engine, assignment)
            if fault is not None:
                raise ModelLoadFailed(fault)
        except BaseException:
            engine.close()
            raise
        return engine

    def _progress(self, listener: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
        logged_at_s = time.monotonic()
        began = False

        def progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal began, logged_at_s
            state.maybe_shutdown()
            if not began:  # it fits
                logger.info("loading %s", self._settings.model)
                began = True
            if listener is not None:
                listener(done_bytes, total_bytes)
            if time.monotonic() - logged_at_s >= PROGRESS_INTERVAL_S:
                logged_at_s = time.monotonic()
                percent = 100 * done_bytes // max(total_bytes, 1)
                logger.info("loaded %d%% of %d MiB", percent, total_bytes // MIB)
                self._report(f"loaded {percent}% of {total_bytes // MIB} MiB")

        return progress
