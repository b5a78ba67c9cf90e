"""Loads the worker's engine: once at the start, and again after each death of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from celery.utils.log import get_logger
from celery.worker import state

from llorch_worker.contract import InternalError, InvalidRequest, LlorchError, ModelLoadFailed
from llorch_worker.contract.token_questions import TokenQuestion
from llorch_worker.engine.process.engine_process import ENGINE, EngineProcess
from llorch_worker.engine.process.surveying import Surveyed, survey
from llorch_worker.engine_options import EngineOptions
from llorch_worker.intake.process import IntakeProcess
from llorch_worker.model_files.hub import local_path
from llorch_worker.model_files.revision import Revision, revision
from llorch_worker.settings import Settings
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.residency_check import violation, wrong_card

if TYPE_CHECKING:
    from llorch_worker.servers.server_engine import Address, ServerEngine

logger = get_logger(__name__)

PROGRESS_INTERVAL_S: Final = 5.0
SILENT_WATCHDOGS: Final = 5
"""Times of a watchdog: a server may let a sequence wait for others that it has preempted it for."""
MIB: Final = 2**20
MOST_CONTEXT: Final = 10**6
"""Of a model that says nothing before it is loaded."""


class EngineLoader:
    """Makes engines that are alike, ready for jobs. A shutdown of the worker ends a load."""

    def __init__(
        self,
        settings: Settings,
        assignment: Assignment,
        *,
        engine_class: str,
        max_sequences: int | None,
        num_threads: int | None = None,
        report: Callable[[str], None],
        memory_bytes: int | None = None,
    ) -> None:
        """``engine_class``: see :meth:`.EngineProcess.load`. ``num_threads``: those that compute;
        None: as many as compute best. ``report`` gets a line at the beginning of a load and every
        few seconds."""
        self._settings = settings
        self._assignment = assignment
        self._engine_class = engine_class
        self._max_sequences = max_sequences
        self._num_threads = num_threads
        self._report = report
        self.memory_bytes = memory_bytes
        """Its share of the memory, beside the worker's other engines."""
        self.loaded_share: float | None = None
        """Of the bytes that it loads now; None while it loads nothing."""
        self.surveyed: Surveyed | None = None
        """What the model's file says; None until :func:`survey_all`."""
        self._starting = threading.Lock()
        self._intake: IntakeProcess | None = None
        self._path = settings.model
        """Where the model lies, from the first intake on also one of the hub."""
        self._read: Revision | None = None
        """What the intake has read."""
        self._address: Address | None = None
        self._first = True
        self._outdated = False
        self._closed = False

    def anew(self) -> EngineLoader:
        """One for what the model's files hold now. It has an intake of its own."""
        return EngineLoader(
            self._settings,
            self._assignment,
            engine_class=self._engine_class,
            max_sequences=self._max_sequences,
            num_threads=self._num_threads,
            report=self._report,
            memory_bytes=self.memory_bytes,
        )

    def survey(self) -> Surveyed:
        """Looks at the model's files again. Raises ModelLoadFailed if that is not possible."""
        local_path(self.model, meanwhile=state.maybe_shutdown)
        options = replace(self._settings.engine_options, memory_bytes=self.memory_bytes)
        [self.surveyed] = survey([self.model], options, fingerprints=True)
        return self.surveyed

    @property
    def takes_what_is_free(self) -> bool:
        """Whether its KV cache takes the memory of a card that is free at the load."""
        return self._assignment.card is not None and self._settings.kv_cache_bytes is None

    @property
    def model(self) -> Path:
        return self._settings.model

    @property
    def is_server(self) -> bool:
        """Whether the engine is a server elsewhere."""
        return self._settings.engine_url is not None

    @property
    def is_of_ours(self) -> bool:
        """Whether the engine is ours; another class, for tests, has no files."""
        return self._engine_class == ENGINE and not self.is_server

    def intake(self, meanwhile: Callable[[], None] = lambda: None) -> IntakeProcess:
        """One for all engines, started when it is first needed. ``meanwhile``: see
        :func:`.local_path`. Raises ModelLoadFailed if the model cannot be downloaded."""
        with self._starting:
            if self._closed:
                raise InternalError(f"{self._settings.served_name} has new weights")
            if self._intake is None:
                self._path = local_path(self._settings.model, meanwhile=meanwhile)
                self._read = revision(self._path)
                self._intake = IntakeProcess(self._path)
            return self._intake

    def answer(self, question: TokenQuestion) -> dict[str, Any]:
        """See :meth:`.IntakeProcess.answer`."""
        if self._settings.engine_url is not None:
            raise InvalidRequest(
                f"a worker of the server {self._settings.engine_url} counts no tokens"
            )
        intake = self.intake()
        try:
            return intake.answer(question)
        except InternalError:
            if intake is self._intake:
                raise
            return self.intake().answer(question)  # the worker has changed its model meanwhile

    def rest(self) -> None:
        """Ends the intake of a model that is not loaded any more. A question about its tokens
        starts another."""
        with self._starting:
            intake, self._intake = self._intake, None
        if intake is not None:
            intake.close()

    def forget(self) -> None:
        """Has the next load read all of the model's files anew."""
        self._outdated = True

    def intake_stacks(self) -> str:
        """See :meth:`.IntakeProcess.stacks`; "" if there is no intake."""
        return "" if self._intake is None else self._intake.stacks()

    def close(self) -> None:
        """Ends the intake; none starts any more."""
        with self._starting:
            self._closed = True
        self.rest()

    def load(
        self, listener: Callable[[int, int], None] | None = None
    ) -> EngineProcess | ServerEngine:
        """Loads and warms up; ``listener`` gets the bytes loaded and the bytes in total. Of a
        server, waits until it answers.

        Raises:
            ModelLoadFailed: the model cannot be loaded, or is not where it should be.
            EngineDied: the process died meanwhile.
        """
        url = self._settings.engine_url
        return self._load_own(listener) if url is None else self._find_server(url)

    def _load_own(self, listener: Callable[[int, int], None] | None) -> EngineProcess:
        self.loaded_share = 0.0
        try:
            engine = self._load_once(listener)
            if engine is None:
                logger.warning("%s is loaded again: its files were replaced meanwhile", self.model)
                engine = self._load_once(listener)
            if engine is None:
                raise ModelLoadFailed(
                    f"the files of {self.model} were replaced twice while they were loaded; "
                    "load it when nothing writes to them."
                )
            return engine
        finally:
            self.loaded_share = None

    def _load_once(self, listener: Callable[[int, int], None] | None) -> EngineProcess | None:
        """None if the files were replaced meanwhile."""
        if self._outdated or self._is_replaced():
            self._outdated = False
            self.rest()
        engine = self._start(listener)
        if not self._is_replaced():
            return engine
        engine.close()
        return None

    def _is_replaced(self) -> bool:
        """Whether the model has other files than the intake has read. An engine must not read
        these."""
        return self._intake is not None and revision(self._path) != self._read

    def _start(self, listener: Callable[[int, int], None] | None) -> EngineProcess:
        settings, assignment = self._settings, self._assignment
        self._report(f"loading {settings.served_name}")
        # Another class, for tests, takes requests as they are.
        intake = self.intake(state.maybe_shutdown) if self.is_of_ours else None
        engine = EngineProcess.load(
            self._path,
            settings.engine_options,
            model_name=settings.served_name,
            progress=self._progress(listener),
            engine_class=self._engine_class,
            intake=intake,
            told_every_s=settings.flush_interval_ms / 1e3,
            kept=() if assignment.lock is None else (assignment.lock,),
            device=assignment.device,
            max_sequences=self._max_sequences,
            memory_bytes=self.memory_bytes,
            num_threads=self._num_threads,
            watchdog_s=settings.watchdog_s,
            meanwhile=state.maybe_shutdown,
        )
        try:
            engine.warm_up()
            fault = wrong_card(engine.facts, assignment) or self._violation(engine)
            if fault is not None:
                raise ModelLoadFailed(fault)
        except BaseException:
            engine.close()
            raise
        return engine

    def _violation(self, engine: EngineProcess) -> str | None:
        """See :func:`violation`; waits for an answer."""
        while True:
            try:
                return violation(engine, self._assignment)
            except TimeoutError:
                engine.look()

    def _find_server(self, url: str) -> ServerEngine:
        # Here, because they need an extra.
        from llorch_worker.servers.server_engine import Address, ServerEngine

        settings, said_at_s = self._settings, float("-inf")
        if self._address is None:
            model = settings.model
            self._address = Address(
                url,
                None,
                str(model),
                settings.served_name,
                silent_s=SILENT_WATCHDOGS * settings.watchdog_s,
            )
        self._address.key = key_of(settings)

        def wait(reason: str) -> None:
            nonlocal said_at_s
            if self._first:
                state.maybe_shutdown()
            self._report(reason)
            if self._first and time.monotonic() - said_at_s >= PROGRESS_INTERVAL_S:
                said_at_s = time.monotonic()
                logger.info("%s", reason)

        engine = ServerEngine.load(self._address, max_sequences=self._max_sequences, wait=wait)
        self._first = False
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
            self.loaded_share = done_bytes / max(total_bytes, 1)
            if listener is not None:
                listener(done_bytes, total_bytes)
            if time.monotonic() - logged_at_s >= PROGRESS_INTERVAL_S:
                logged_at_s = time.monotonic()
                percent = 100 * done_bytes // max(total_bytes, 1)
                logger.info("loaded %d%% of %d MiB", percent, total_bytes // MIB)
                self._report(f"loaded {percent}% of {total_bytes // MIB} MiB")

        return progress


def survey_all(loaders: Mapping[str, EngineLoader], settings: Settings) -> None:
    """Finds out what the models of a worker with several are, and whether each can be loaded alone.
    Raises ModelLoadFailed for one that cannot."""
    of_ours = [loader for loader in loaders.values() if loader.is_of_ours]
    for loader in of_ours:
        local_path(loader.model, meanwhile=state.maybe_shutdown)
    found = survey([loader.model for loader in of_ours], settings.engine_options, settings.resident)
    for loader, surveyed in zip(of_ours, found, strict=True):
        loader.surveyed, loader.memory_bytes = surveyed, surveyed.memory_bytes
    for name, loader in loaders.items():
        loader.surveyed = loader.surveyed or Surveyed(settings.max_context or MOST_CONTEXT)
        if loader.surveyed.refusal is not None:
            raise ModelLoadFailed(f"{name}: {loader.surveyed.refusal}")


@dataclass(frozen=True)
class Loaded:
    """An engine, and how long loading and warming it up took."""

    engine: EngineProcess | ServerEngine
    load_s: float


def load_first(
    loaders: Sequence[EngineLoader], count: int, listener: Callable[[int, int], None] | None
) -> list[Loaded]:
    """The engines of the first ``count`` models that load. Raises what the first raised that does
    not, if so many do not."""
    found: list[Loaded] = []
    failed: LlorchError | None = None
    for place, loader in enumerate(loaders):
        began_s = time.monotonic()
        try:
            found.append(Loaded(loader.load(listener), time.monotonic() - began_s))
        except LlorchError as error:
            failed = failed or error
            if len(loaders) - place > count - len(found):
                logger.error("%s does not load: %s", loader.model, error.message)
                continue
            for each in found:
                each.engine.close()
            raise failed from None
        if len(found) == count:
            break
    return found


def warn_of_ignored(settings: Settings) -> None:
    """For a worker of servers alone, names the variables that were set and concern an engine of
    ours."""
    given, usual = settings.engine_options, EngineOptions()
    ignored = [
        f"LLORCH_{each.name.upper()}"
        for each in fields(EngineOptions)
        if each.name not in ("device", "max_sequences", "low_waits_at_most_s")
        and getattr(given, each.name) != getattr(usual, each.name)
    ]
    if ignored:
        logger.warning(
            "no effect with LLORCH_ENGINE_URL, where the server decides: %s", ", ".join(ignored)
        )


def key_of(settings: Settings) -> str | None:
    """The key of the servers. Raises ModelLoadFailed if its file cannot be read."""
    if settings.engine_key is not None:
        return settings.engine_key.get_secret_value().strip()
    if settings.engine_key_file is None:
        return None
    try:
        return settings.engine_key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise ModelLoadFailed(
            f"LLORCH_ENGINE_KEY_FILE {settings.engine_key_file}: {reason}"
        ) from None
