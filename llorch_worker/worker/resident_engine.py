"""The worker's engine, and after its death the next one."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from celery.utils.log import get_logger

from llorch_worker.allocator import return_freed_memory
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.contract import InternalError, LlorchError
from llorch_worker.engine.interface import Death, EngineDied, EngineStats, StepFigures
from llorch_worker.processes.restarts import Restarts, in_words
from llorch_worker.worker.which_model import Reason

if TYPE_CHECKING:
    from llorch_worker.broker.jobs.ended_jobs import EndedJob
    from llorch_worker.contract import JobRequest, Journal
    from llorch_worker.engine.handle import GenerationHandle
    from llorch_worker.engine.interface import ModelFacts
    from llorch_worker.engine.process.engine_process import EngineProcess
    from llorch_worker.servers.server_engine import ServerEngine

    AnyEngine = EngineProcess | ServerEngine

logger = get_logger(__name__)

LoadReason = Literal[Reason, "reload", "death"]
"""Why a model is loaded: as the rule says; it has new weights; its engine died."""

POLL_S: Final = 0.05
SECOND_LOOK_S: Final = 0.5
MOST_LOOKS_S: Final = 1.0
MOST_SHOWN: Final = 1_000
"""Characters of what is said of a death."""


@dataclass(frozen=True)
class Absence:
    """Why the worker has no engine now."""

    reason: str
    since: float
    """Unix time."""
    starts_s: float | None = None
    """When the next one starts, by the monotonic clock; None while it loads, infinite if nobody has
    asked for one."""

    planned: bool = False
    """Whether no engine was lost."""
    of_server: bool = False
    """Whether a server is away, which is looked for all the time."""

    def __str__(self) -> str:
        if self.of_server:
            return f"{self.reason}; it is looked for every second"
        if self.planned:
            return self.reason
        in_s = (self.starts_s or 0.0) - time.monotonic()
        return f"{self.reason}; it starts again {in_words(in_s)}"


class ResidentEngine:
    """One engine for all others, away for a while after each death. Any thread may call it.

    A thread starts the next engine: at once, and later each time that one dies soon. Meanwhile
    :attr:`healthy` is false, and the worker claims nothing. Another thread kills an engine that
    finishes no step for ``watchdog_s``.
    """

    def __init__(
        self,
        engine: AnyEngine,
        load: Callable[[], AnyEngine],
        *,
        load_s: float = 0.0,
        watchdog_s: float,
        on_death: Callable[[Death], Collection[str]],
        on_change: Callable[[], None],
    ) -> None:
        """``load`` loads and warms up another engine like ``engine``; it may raise LlorchError.
        ``load_s``: how long this one took. ``on_death`` is called before the jobs of an engine that
        died fail; it returns those that are blamed. ``on_change`` is called on a thread of this,
        after a death and when the next one serves.
        """
        self._engine = engine
        self._load = load
        self._former: AnyEngine | None = None
        """Of other weights, whose jobs go on: see :meth:`take`."""
        self._awaited: ModelFacts | None = None
        """What is known of another model, until its engine is there."""
        self._entering: set[tuple[AnyEngine, str]] = set()
        """Jobs that an engine takes in now."""
        self.moving = threading.Lock()
        """Held by whoever changes the model or its weights."""
        self._watchdog_s = watchdog_s
        self._on_death = on_death
        self._on_change = on_change
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._served_since_s = time.monotonic()
        self.load_s = load_s
        """How long loading and warming up the engine took."""
        self._restarts = Restarts()
        self.absence: Absence | None = None
        self.deaths: Counter[tuple[str, str]] = Counter()
        """By model and :data:`.DeathLabel`, failed starts included."""
        self.loads: Counter[tuple[str, str]] = Counter({(self._model, "first"): 1})
        """Those that succeeded, by model."""
        self._reason: LoadReason = "death"
        """Of the next one."""
        self.last_death: str | None = None
        """How the last engine ended, in a few words."""
        self.last_death_at: float | None = None
        """Unix time."""
        self._starter = threading.Thread(
            target=self._replace, name="llorch-engine-starter", daemon=True
        )
        every_s = min(MOST_LOOKS_S, watchdog_s / 4)
        self._watchdog = Repeater("watchdog", "look at the engine", self._look, every_s)

    def start(self) -> None:
        self._mourn(self._engine)
        self._starter.start()
        self._watchdog.start()

    def close(self) -> None:
        """Ends the engine; none starts any more. One that loads ends with the process."""
        with self._changed:
            self._closing.set()
            self._watchdog.closing.set()
            self._changed.notify_all()
        self.let_go()
        self._engine.close()

    def note_end(self, job: EndedJob) -> None:
        """Notes that a job has ended; an observer of ``ENDED_JOBS``."""
        if job.error is None:
            self._restarts.end_row()

    def change(
        self,
        load: Callable[[], AnyEngine],
        why: str,
        reason: LoadReason,
        awaited: ModelFacts | None = None,
    ) -> bool:
        """Ends the engine, whose jobs have left, and has another one loaded, now and after each
        death. ``awaited``: what is known of its model, if that is another. False if one is being
        loaded now."""
        # First: both may not fit.
        if not self.rest(why):
            return False
        with self._changed:
            self._load, self._reason = load, reason
            if awaited is not None:
                self._awaited, self.load_s = awaited, 0.0
            self.absence = Absence(why, time.time(), time.monotonic(), planned=True)
            self._changed.notify_all()
        return True

    def rest(self, why: str) -> bool:
        """Ends the engine, whose jobs have left, until :meth:`change`. False if one is being loaded
        now."""
        with self._changed:
            if self.absence is not None and self.absence.starts_s is None:
                return False
            self.absence = Absence(why, time.time(), math.inf, planned=True)
            self._restarts.end_row()
        self._engine.close()
        return True

    @property
    def current(self) -> AnyEngine | None:
        """The engine that takes jobs; None while there is none."""
        return self._engine if self.healthy else None

    def take(
        self, engine: AnyEngine, load: Callable[[], AnyEngine], *, instead_of: AnyEngine
    ) -> bool:
        """Gives ``engine`` the jobs that come from now on. Those that ``instead_of`` has go on
        there until :meth:`let_go`. ``load``: as of the constructor. False if ``instead_of`` has
        ended meanwhile."""
        with self._changed:
            if self._closing.is_set() or self.absence or self._engine is not instead_of:
                return False
            self._former, self._engine, self._load = instead_of, engine, load
            self._served_since_s = time.monotonic()
            self._restarts.end_row()
            self.loads[self._model, "reload"] += 1
        self._mourn(engine)
        self._tell_change()
        return True

    def await_next(
        self, closing: threading.Event, meanwhile: Callable[[], None] = lambda: None
    ) -> bool:
        """Waits until the next engine is there or has not started; False once ``closing`` is set.
        ``meanwhile`` is called every few ms."""
        failed = self.deaths.total()
        while self.absence is not None and self.deaths.total() == failed:
            if closing.wait(POLL_S):
                return False
            meanwhile()
        return True

    def jobs_of(self, engine: EngineProcess) -> tuple[str, ...]:
        """The ids of the jobs that an engine has. One whose place was taken gets no others."""
        entering = [job_id for each, job_id in [*self._entering] if each is engine]
        return (*entering, *engine.open_jobs)

    def let_go(self) -> None:
        """Ends the engine that another one has taken the place of."""
        former, self._former = self._former, None
        if former is not None:
            former.close()

    # The engine's interface --------------------------------------------------------------------

    @property
    def facts(self) -> ModelFacts:
        return self._awaited or self._engine.facts

    @property
    def _model(self) -> str:
        return self.facts.model_name

    @property
    def away(self) -> str | None:
        """Why there is no engine now, and when the next one starts, in one line."""
        return None if self.absence is None else " ".join(str(self.absence).split())[:MOST_SHOWN]

    @property
    def pid(self) -> int | None:
        """Of the engine's process, the last if it is away; None of a server."""
        return self._engine.pid

    @property
    def healthy(self) -> bool:
        return self.absence is None and self._engine.healthy

    def submit(self, *args: Any, **options: Any) -> GenerationHandle[Any, Any]:
        """Raises ``EngineDied`` while it is away, and what :meth:`.Engine.submit` does. So too if
        the tokens of its ``journal`` are of weights that were replaced meanwhile."""
        journal: Journal | None = options.get("journal")
        with self._unless_it_changes() as engine:
            # Noted before it looks whether it still is the engine: see jobs_of.
            self._entering.add(entering := (engine, str(options.get("job_id"))))
            try:
                stale = journal and journal.fingerprint != engine.facts.fingerprint
                if stale or engine is not self._engine:
                    raise _replaced()
                return engine.submit(*args, **options)
            finally:
                self._entering.discard(entering)

    def continues(
        self, request: JobRequest, journal: Journal, is_wanted: Callable[[], bool]
    ) -> bool:
        """Whether a job can go on after the tokens of its journal, which are of this model; any
        answer once it is not wanted. Raises ``EngineDied``."""
        with self._unless_it_changes() as engine:
            return engine.continues(request, journal, is_wanted)

    @contextmanager
    def _unless_it_changes(self) -> Iterator[AnyEngine]:
        """The engine. Raises ``EngineDied``, which blames no job, for one that comes while the
        engine ends."""
        engine = self._engine
        try:
            yield engine
        except EngineDied:
            raise  # by itself: the job that it had may be to blame
        except InternalError:
            if engine is not self._engine:
                raise _replaced() from None
            if self.absence is None:
                raise
            raise EngineDied(Death("exit", self.absence.reason, (), 0)) from None

    def stats(self) -> EngineStats:
        """While it is away those of the last engine, at rest; none if the next one has another
        model."""
        if (awaited := self._awaited) is not None:
            return _stats_before(awaited)
        stats = self._engine.stats()
        if self.absence is None:
            if (former := self._former) is None:
                return stats
            more = former.stats()
            return replace(
                stats, running=stats.running + more.running, waiting=stats.waiting + more.waiting
            )
        return replace(stats, running=0, waiting=0, tokens_per_s=0.0)

    def step_figures(self) -> StepFigures:
        return StepFigures() if self._awaited else self._engine.step_figures()

    def misplaced_tensors(self) -> tuple[str, ...]:
        return () if self.absence else self._engine.misplaced_tensors()

    def stacks(self) -> str:
        """See :meth:`.EngineProcess.stacks`."""
        return self._engine.stacks()

    def stalled_for_s(self) -> float:
        return 0.0 if self.absence else self._engine.stalled_for_s()

    # Deaths ------------------------------------------------------------------------------------

    def _mourn(self, engine: AnyEngine) -> None:
        # If it is dead already, this is called at once.
        engine.on_death(partial(self._note_death, engine))

    def _note_death(self, engine: AnyEngine, death: Death) -> None:
        blamed = self._on_death(death)
        if self._closing.is_set():
            return
        if engine is not self._engine:
            with self._changed:
                self.deaths[engine.facts.model_name, death.label] += 1
            logger.error("the engine of the weights that were replaced died: %s", death.reason)
            return
        lived_s = time.monotonic() - self._served_since_s
        with self._changed:
            if self.absence is not None and self.absence.planned:
                # It was about to end. What comes next is decided.
                self.deaths[engine.facts.model_name, death.label] += 1
                return
            pause_s = self._restarts.pause_s(lived_s)
            self._reason, of_server = "death", death.label == "server"
            what = death.reason if of_server else f"the engine died: {death.reason}"
            self._be_away(what, 0.0 if of_server else pause_s, of_server=of_server)
            self.deaths[engine.facts.model_name, death.label] += 1
            self._note_reason(death.reason)
            self._changed.notify_all()
        logger.critical(
            "%s; jobs that go on: %d, of these suspects: %d",
            what,
            len(HELD_CLAIMS.running(engine.facts.model_name)),
            len(blamed),
        )

    def _note_reason(self, reason: str) -> None:
        self.last_death, self.last_death_at = reason[:MOST_SHOWN], time.time()

    def _be_away(self, reason: str, pause_s: float, *, of_server: bool = False) -> None:
        now = time.time()
        since = now if self.absence is None else self.absence.since
        starts_s = time.monotonic() + pause_s
        self.absence = Absence(reason, since, starts_s, of_server=of_server)

    def _replace(self) -> None:
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self.absence is not None or self._closing.is_set())
            if self._closing.is_set():
                return
            self._tell_change()
            self._start_another()

    def _start_another(self) -> None:
        with self._changed:
            while (wait_s := self._starts_in_s()) > 0 and not self._closing.is_set():
                # A change may come meanwhile.
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))
            absence = self.absence
            if absence is None or self._closing.is_set():
                return
            self.absence, load = replace(absence, starts_s=None), self._load
        began_s = time.monotonic()
        try:
            engine = load()
        except Exception as error:
            reason = reason_of(error)
            with self._changed:
                self.deaths[self._model, "load"] += 1
                self._note_reason(reason)
                pause_s = self._restarts.pause_s(0.0)
                self._be_away(f"the engine does not start: {reason}", pause_s)
            if not self._closing.is_set():
                known = isinstance(error, LlorchError)
                logger.error("%s", self.absence, exc_info=None if known else error)
            return
        with self._changed:  # a close ends the one before, or this one
            is_closing = self._closing.is_set()
            if not is_closing:
                self._engine, self._awaited = engine, None
                self._served_since_s = time.monotonic()
                self.absence = None
                if not absence.of_server:
                    self.loads[self._model, self._reason] += 1
        if is_closing:
            engine.close()
            return
        self.load_s = loaded_s = self._served_since_s - began_s
        # Whoever planned it says so.
        (logger.debug if absence.planned else logger.info)(
            "the %s serves again after %.1f s%s",
            "server" if absence.of_server else "engine",
            time.time() - absence.since,
            "" if absence.of_server else f", of which it loaded for {loaded_s:.1f} s",
        )
        self._mourn(engine)
        self._tell_change()
        # What was held of the engine before.
        return_freed_memory()

    def _starts_in_s(self) -> float:
        return 0.0 if self.absence is None else (self.absence.starts_s or 0.0) - time.monotonic()

    def _tell_change(self) -> None:
        try:
            self._on_change()
        except Exception:  # such as no room for a thread; without this one no engine starts again
            logger.exception("the change of the engine was not told")

    # The watchdog ------------------------------------------------------------------------------

    def _look(self) -> None:
        engines: tuple[AnyEngine | None, ...] = (self._engine, self._former)
        for engine in engines:
            if engine is not None and engine.stalled_for_s() >= self._watchdog_s:
                # Processes that were suspended and go on look stalled until the next step.
                self._closing.wait(SECOND_LOOK_S)
                if (stalled_s := engine.stalled_for_s()) >= self._watchdog_s:
                    engine.kill("stalled", f"it finished no step for {stalled_s:.0f} s")


def _replaced() -> EngineDied:
    return EngineDied(Death("exit", "other weights took its place", (), 0))


def _stats_before(facts: ModelFacts) -> EngineStats:
    """Those of an engine that is not there yet."""
    return EngineStats(
        model=facts.model_name,
        device=facts.device,
        dtype="",
        bytes={},
        planned_bytes={},
        measured_bytes={},
        max_context=facts.max_context,
        max_sequences=facts.max_sequences,
        running=0,
        waiting=0,
        tokens_per_s=0.0,
    )


def reason_of(error: Exception) -> str:
    """Why an engine did not start, in a few words."""
    if isinstance(error, EngineDied):
        return error.death.reason
    return error.message if isinstance(error, LlorchError) else f"{type(error).__name__}: {error}"
