"""Changes the model of a seat of a worker that has several, as the rule in ``which_model.py`` says,
and ends an engine that has no jobs."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from celery.utils.log import get_logger
from redis import Redis
from redis.exceptions import RedisError

from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.fleet import residents
from llorch_worker.broker.fleet.residents import Note, Notes
from llorch_worker.broker.jobs.cancellation import fail_all_waiting
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.jobs.deadlines import next_deadlines
from llorch_worker.broker.jobs.ended_jobs import ENDED_JOBS, EndedJob
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.waiting.waiting import waiting
from llorch_worker.contract import ModelLoadFailed
from llorch_worker.contract.quantities import counted
from llorch_worker.engine.interface import ModelFacts
from llorch_worker.settings import Settings
from llorch_worker.worker.leaving import let_leave
from llorch_worker.worker.which_model import Change, Terms, Waiting, next_change, rotation_s

if TYPE_CHECKING:
    from llorch_worker.worker.engine_loader import EngineLoader
    from llorch_worker.worker.resident_engine import ResidentEngine

logger = get_logger(__name__)

LOOK_S: Final = 1.0
DEFAULT_LOAD_S: Final = 10.0
DEFAULT_JOB_S: Final = 1.0
"""What a load and a job take before any was measured."""
LEAST_JOB_S: Final = 0.01
REMEMBERED_JOBS: Final = 100
"""Of so many jobs half is forgotten, so that what a job takes follows what comes."""
ASIDE_S: Final = 30.0
LONGEST_ASIDE_S: Final = 1_800.0
"""How long a model that did not load is set aside: first, and at most."""
MOST_TRIES: Final = 5
"""How often a worker that starts decides again because another has decided meanwhile."""


@dataclass(frozen=True)
class SetAside:
    """A model that did not load here."""

    reason: str
    until_s: float
    times: int


class ModelChanger(Repeater):
    """A thread that looks once a second at what waits and at what other seats keep, of this worker
    and of others. To the rule each seat is a worker."""

    def __init__(
        self,
        client: Redis,
        settings: Settings,
        name: str,
        engine: ResidentEngine,
        loaders: Mapping[str, EngineLoader],
        models: Sequence[str],
        *,
        taken: Callable[[], Collection[str]],
        hand_back: Callable[[Collection[str]], None],
        on_change: Callable[[], None],
    ) -> None:
        """``name``: see :func:`.residents.seat_name`. ``loaders``: of each model of the worker;
        ``models``: those that the seat may have; ``taken``: those of the worker's other seats.
        ``hand_back`` returns running jobs to their queues, by their ids; ``on_change`` is called
        when the seat takes jobs again, or no more."""
        self._redis = client
        self._name = name
        self._engine = engine
        self._loaders = loaders
        self._models = models
        self._taken = taken
        self._hand_back = hand_back
        self._on_change = on_change
        self._settings = settings
        self._terms = terms_of(settings)
        self._pin = settings.pin
        self._idle_unload_s = settings.idle_unload_s or math.inf
        self._model = engine.facts.model_name
        """What the seat has loaded or is loading."""
        self._next: str | None = None
        """What it is about to load."""
        self._since_s = time.monotonic()
        self._load_s = {self._model: engine.load_s}
        self._busy_s: defaultdict[str, float] = defaultdict(float)
        self._ended: Counter[str] = Counter()
        self._looked_s = self._busy_at_s = time.monotonic()
        self._renew_at_s = 0.0
        self._unloaded = False
        self._asked: deque[str | None] = deque()
        """Models that somebody wants; None: none."""
        self._aside: dict[str, SetAside] = {}
        self._failed_loads = 0
        self._waits_since_s: dict[str, float] = {}
        self.late_s = 0.0
        """How much longer than it may a model waits for a worker, if all have jobs."""
        self.changing = False
        """Whether the seat takes no jobs, because it is about to change."""
        super().__init__("models", "choose the model", self._look_unless_it_moves, LOOK_S)

    def note_end(self, job: EndedJob) -> None:
        """Notes that a job has ended; an observer of ``ENDED_JOBS``."""
        if job.error != ModelLoadFailed.code:
            self._ended[job.model] += 1

    def close(self) -> None:
        super().close()
        with suppress(RedisError):  # the note is soon too old
            residents.withdraw(self._redis, self._name)

    @property
    def model(self) -> str:
        """What the seat has loaded, is loading or is about to load."""
        return self._next or self._model

    def figures(self) -> dict[str, Any]:
        """All models as plain JSON, and of those that do not load here now, why."""
        aside = {name: each.reason for name, each in [*self._aside.items()]}
        return {"models": [*self._loaders], "set_aside": aside, "late_s": round(self.late_s, 1)}

    def ask(self, model: str | None) -> None:
        """Loads the model soon, whatever the rule says now; None ends the engine, until jobs
        wait."""
        self._asked.append(model)

    # Deciding ----------------------------------------------------------------------------------

    def _look_unless_it_moves(self) -> None:
        if not self._engine.moving.acquire(blocking=False):
            # A reload may take minutes. Others shall neither miss this seat nor wait for it to
            # change.
            note = self._note()
            self._renew(note.model_copy(update={"kept_s": min(note.kept_s, -LOOK_S)}))
            return
        try:
            self._look()
        finally:
            self._engine.moving.release()

    def _look(self) -> None:
        self._measure()
        seen = self._noted()
        due_s = next_deadlines(self._redis, seen.now_ms)
        waits = {
            model: found
            for model in self._models
            if (found := self._waiting(model, seen, due_s.get(model, math.inf))) is not None
        }
        if waits.keys() & {self._model, *self._may_load()}:
            self._busy_at_s = time.monotonic()
        for model in waits:
            if model in self._aside and not seen.may_serve(model):
                self._fail_waiting(model)
        if self._asked:
            self._obey(self._asked.popleft(), seen)
        elif (change := next_change(seen.of_workers, waits, self._terms)) is not None:
            if change.worker == self._name:
                self._begin(change, seen)
        elif time.monotonic() - self._busy_at_s >= self._idle_unload_s and not self.is_pinned:
            self._unload(f"unloaded after {self._idle_unload_s:.0f} s without jobs")
        self._note_long_rotation(seen)
        self.closing.wait(random.uniform(0.0, 0.1) * LOOK_S)

    def _noted(self) -> Notes:
        """The notes of all, with this worker's as of now."""
        seen = residents.read(self._redis, self._models)
        residents.renew(self._redis, note := self._note(), seen.now_ms)
        others = (each for each in seen.of_workers if each.worker != self._name)
        of_workers = sorted((*others, note), key=lambda each: each.worker)
        return Notes(tuple(of_workers), seen.left_s, seen.now_ms, seen.decisions)

    def _note(self) -> Note:
        now_s = time.monotonic()
        usual_s = mean(self._load_s.values())
        is_here = self._engine.absence is None
        return Note(
            worker=self._name,
            resident=None if self._unloaded or self._model in self._aside else self._model,
            kept_s=now_s - self._since_s if is_here else -self._load_s.get(self._model, usual_s),
            load_s={name: self._load_s.get(name, usual_s) for name in self._may_load()},
            job_s=self._job_s(),
            left_s=len(self._running()) * self._job_s().get(self._model, DEFAULT_JOB_S),
            lost_s=self._lost_s() if is_here else 0.0,
            pinned=self.is_pinned,
            set_aside=self._kept_aside(),
        )

    def _may_load(self) -> list[str]:
        """The models that it can load now, also the one that it has."""
        others = {*self._kept_aside(), *self._taken()}
        own = [self._model] if self._model == self._pin else self._models
        return [name for name in own if name not in others]

    def _kept_aside(self) -> dict[str, int]:
        """The models that it does not try to load now, and how often each has failed."""
        now_s = time.monotonic()
        return {name: each.times for name, each in self._aside.items() if now_s < each.until_s}

    @property
    def is_pinned(self) -> bool:
        """Whether it keeps its model in any case."""
        return self._model == self._pin and not self._unloaded

    def _running(self) -> tuple[Claim, ...]:
        return HELD_CLAIMS.running(self._model)

    def _measure(self) -> None:
        now_s = time.monotonic()
        if HELD_CLAIMS.of(self._model):
            self._busy_at_s = now_s
        if self._running() and self._engine.healthy:
            self._busy_s[self._model] += now_s - self._looked_s
        self._looked_s = now_s
        if self._ended[self._model] >= REMEMBERED_JOBS:
            self._ended[self._model] //= 2
            self._busy_s[self._model] /= 2
        if self._engine.healthy and self._aside.pop(self._model, None) is not None:
            self._since_s = now_s  # it was tried again
        deaths = [*self._engine.deaths.items()]
        failed = sum(count for (_, label), count in deaths if label == "load")
        if failed > self._failed_loads and not self._engine.healthy:
            self._put_aside(self._model)
        self._failed_loads = failed

    def _job_s(self) -> dict[str, float]:
        """How long the engine was busy for a job, by model."""
        return {
            model: max(LEAST_JOB_S, self._busy_s[model] / ended)
            for model, ended in [*self._ended.items()]
            if ended
        }

    def _lost_s(self) -> float:
        """How long the prefixes in the cache took that are found again; at most a load."""
        stats = self._engine.stats()
        computed, found = stats.prompt_tokens_total, stats.cached_tokens_total
        if not found or not computed:
            return 0.0
        saved_s = self._busy_s[self._model] * found / computed
        return min(saved_s, self._load_s.get(self._model, DEFAULT_LOAD_S))

    def _waiting(self, model: str, seen: Notes, due_s: float) -> Waiting | None:
        """What waits for the model. All that the rule knows of the queue comes from here."""
        queues = waiting(self._redis, model).queues
        if not any(queue.jobs for queue in queues.values()):
            self._waits_since_s.pop(model, None)
            return None
        since_s = self._waits_since_s.setdefault(model, time.monotonic())
        known_s = [queue.oldest_s for queue in queues.values() if queue.oldest_s is not None]
        oldest_s = max(known_s, default=time.monotonic() - since_s)
        measured_s = [note.job_s[model] for note in seen.of_workers if model in note.job_s]
        job_s = mean(measured_s) if measured_s else DEFAULT_JOB_S
        return Waiting(
            {priority: queue.jobs * job_s for priority, queue in queues.items()},
            unserved_s=min(oldest_s, seen.left_s.get(model, oldest_s)),
            slack_s=due_s - job_s,
        )

    def _note_long_rotation(self, seen: Notes) -> None:
        changing = [note for note in seen.of_workers if not note.pinned]
        stay = {note.resident for note in seen.of_workers if note.pinned}
        models = {name for note in changing for name in note.load_s} - stay
        longest_s = max((load for note in changing for load in note.load_s.values()), default=0.0)
        rotation = rotation_s(len(models), len(changing), longest_s, self._terms)
        was_late, self.late_s = self.late_s > 0, max(0.0, rotation - self._terms.max_wait_s)
        if not was_late and self.late_s > 0:
            logger.warning(
                "jobs may wait longer than LLORCH_MAX_WAIT_S=%.0f for their model: %d models "
                "share %d engines, so one may wait %.0f s; start more workers, or raise it",
                self._terms.max_wait_s,
                len(models),
                len(changing),
                rotation,
            )

    # Changing ----------------------------------------------------------------------------------

    def _obey(self, model: str | None, seen: Notes) -> None:
        """Does what somebody has asked for."""
        if model is None:
            self._unload("unloaded, as somebody asked; the next job has it loaded")
        elif (model != self._model or self._unloaded) and model not in self._taken():
            change = Change(self._name, model, "asked", self._terms.max_wait_s)
            if not self._begin(change, seen):
                self._asked.appendleft(model)

    def _unload(self, why: str) -> None:
        """Ends the engine until jobs wait."""
        if self._unloaded:
            return
        with self._without_jobs(0.0, self._note()) as have_left:
            if not have_left or not self._engine.rest(why):
                return
            self._unloaded = True
            self._loaders[self._model].rest()
        logger.info("%s is %s", self._model, why)

    def _begin(self, change: Change, seen: Notes) -> bool:
        """Changes; False if it has to look at the notes anew."""
        # Before it decides: of two seats that decide at the same time, one has to look anew.
        self._next = change.model
        try:
            return self._change(change, seen)
        finally:
            self._next = None

    def _change(self, change: Change, seen: Notes) -> bool:
        before, now_s = self._model, time.monotonic()
        note = self._note().model_copy(
            update={
                "resident": change.model,
                "kept_s": -self._load_s.get(change.model, DEFAULT_LOAD_S),
                "pinned": change.model == self._pin,
            }
        )
        kept_elsewhere = any(
            each.resident == before and each.kept_s >= 0 and each.worker != self._name
            for each in seen.of_workers
        )
        leaves = None if kept_elsewhere or self._engine.absence else before
        move = (
            f"loads {change.model}"
            if self._unloaded
            else f"changes from {before} to {change.model}"
        )
        if not residents.decide(self._redis, note, seen, leaves=leaves):
            return False
        logger.info("%s: %s", move, WHY[change.reason])
        with self._without_jobs(change.patience_s, note) as have_left:
            if not have_left:
                logger.warning("stays with %s: its jobs do not leave", before)
                return True
            load, awaited = self._loaders[change.model].load, self._facts_of(change.model)
            if not self._engine.change(load, move, change.reason, awaited):
                return False
            self._unloaded = False
            if before != change.model:
                self._loaders[before].rest()
            self._model = change.model
            self._since_s = time.monotonic()
            self._wait_for_engine(note)
        if self._engine.absence is None:
            self._load_s[change.model] = time.monotonic() - self._since_s
            self._since_s = time.monotonic()
            self._aside.pop(change.model, None)
            logger.info(
                "%s is resident after %.1f s, of which it loaded for %.1f s",
                change.model,
                time.monotonic() - now_s,
                self._load_s[change.model],
            )
        elif not self.closing.is_set():
            self._put_aside(change.model)
        return True

    def _facts_of(self, model: str) -> ModelFacts | None:
        """What is known of another model than the seat's before it is loaded."""
        now, surveyed = self._engine.facts, self._loaders[model].surveyed
        if model == now.model_name or surveyed is None:
            return None
        return ModelFacts(
            model,
            max_context=surveyed.max_context,
            max_sequences=now.max_sequences,
            generation_config=surveyed.generation_config,
            device=now.device,
            card_uuids=now.card_uuids,
            tasks=tuple(surveyed.tasks),
        )

    @contextmanager
    def _without_jobs(self, patience_s: float, note: Note) -> Iterator[bool]:
        """Takes no jobs meanwhile. Those that run may end for ``patience_s``; then they go back.
        The ``note`` says so to others."""
        self.changing = True
        self._on_change()
        try:
            have_left = let_leave(
                lambda: [claim.job_id for claim in self._running()],
                patience_s,
                hand_back=self._hand_back,
                closing=self.closing,
                meanwhile=lambda: self._renew(note),
            )
            yield have_left and not self.closing.is_set()
        finally:
            self.changing = False
            self._on_change()

    def _renew(self, note: Note) -> None:
        """Writes the note again if that was long ago."""
        if time.monotonic() < self._renew_at_s:
            return
        self._renew_at_s = time.monotonic() + LOOK_S
        with suppress(RedisError):  # what takes long goes on without it
            residents.renew(self._redis, note, residents.read(self._redis).now_ms)

    def _wait_for_engine(self, note: Note) -> None:
        """Until it is there, or has not started."""

        def renew() -> None:
            left_s = self._since_s - time.monotonic() - note.kept_s
            self._renew(note.model_copy(update={"kept_s": -max(0.1, left_s)}))

        self._engine.await_next(self.closing, renew)

    def _put_aside(self, model: str) -> None:
        if model in self._aside and time.monotonic() < self._aside[model].until_s:
            return
        times = self._aside[model].times + 1 if model in self._aside else 1
        for_s = min(LONGEST_ASIDE_S, ASIDE_S * 2 ** (times - 1))
        reason = self._engine.last_death or "it does not load"
        self._aside[model] = SetAside(reason, time.monotonic() + for_s, times)
        logger.error(
            "%s is set aside for %.0f s, because it does not load: %s", model, for_s, reason
        )

    def _fail_waiting(self, model: str) -> None:
        """Fails what waits for a model that no worker can load."""
        reason = self._aside[model].reason
        error = ModelLoadFailed(f"no worker can load {model}: {reason}", retriable=True)
        job_ids = fail_all_waiting(self._redis, model, error, self._settings)
        for job_id in job_ids:
            ENDED_JOBS.tell(
                EndedJob(
                    id=job_id,
                    model=model,
                    worker=residents.hostname_of(self._name),
                    attempts=0,
                    ended_at=time.time(),
                    outcome="failed",
                    error=error.code,
                )
            )
        if job_ids:
            jobs = counted(len(job_ids), "job")
            logger.error("%s of %s failed: %s", jobs, model, error.message)


WHY: Final = {
    "wait": "its jobs have waited as long as they may",
    "idle": "its jobs wait, and this worker has none",
    "backlog": "far more waits for it",
    "first": "its jobs wait",
    "asked": "somebody asked for it",
}


def terms_of(settings: Settings) -> Terms:
    return Terms(settings.max_wait_s, settings.min_resident_s, LOOK_S)


def first_models(
    client: Redis, settings: Settings, hostname: str, names: Sequence[str]
) -> list[str]:
    """Those of these models that a worker loads at its start, one for each seat."""
    chosen = [settings.pin] if settings.pin in names else []
    while len(chosen) < settings.resident:
        left = [name for name in names if name not in chosen]
        seat = residents.seat_name(hostname, len(chosen))
        chosen.append(_first_model(client, settings, seat, left))
    return chosen


def _first_model(client: Redis, settings: Settings, name: str, names: Sequence[str]) -> str:
    """The one of these models that most waits for, else the one that fewest workers keep."""
    load_s = dict.fromkeys(names, DEFAULT_LOAD_S)
    for _ in range(MOST_TRIES):
        try:
            seen = residents.read(client, names)
            kept = Counter(note.resident for note in seen.of_workers)
            waits = {
                each: Waiting(
                    {
                        priority: queue.jobs * DEFAULT_JOB_S
                        for priority, queue in waiting(client, each).queues.items()
                    }
                )
                for each in names
            }
            # The others decide for themselves.
            change = next_change(
                [
                    Note(worker=name, load_s=load_s),
                    *(
                        note.model_copy(update={"pinned": True})
                        for note in seen.of_workers
                        if note.worker != name
                    ),
                ],
                waits,
                terms_of(settings),
            )
            chosen = change.model if change is not None else min(names, key=lambda each: kept[each])
            note = Note(worker=name, resident=chosen, kept_s=-DEFAULT_LOAD_S, load_s=load_s)
            if residents.decide(client, note, seen, leaves=None):
                return chosen
        except RedisError as error:
            logger.warning("loads %s first: %s", names[0], error)
            break
    return names[0]
