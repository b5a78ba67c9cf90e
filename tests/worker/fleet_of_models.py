"""A fleet of workers that change their models, with a clock of its own.

An engine computes one job's work a second, in order; a change hands the running job back, which
goes on where it was. Jobs wait by model.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, takewhile

from llorch_worker.broker.fleet.residents import Note
from llorch_worker.worker.which_model import Change, Terms, Waiting, next_change

TICK_S = 1.0
"""How often each worker looks."""


@dataclass(eq=False)
class Job:
    model: str
    came_s: float
    left_s: float
    began_s: float | None = None
    ended_s: float | None = None


@dataclass(eq=False)
class Worker:
    """A seat of a worker, which most have one of."""

    name: str
    host: int
    resident: str | None = None
    since_s: float = 0.0
    """When it has loaded it, or will have."""
    running: Job | None = None
    loads: Counter[str] = field(default_factory=Counter)


Policy = Callable[["Simulation"], Change | None]


class Simulation:
    def __init__(
        self,
        arrivals: Sequence[Job],
        workers: int,
        load_s: Mapping[str, float],
        terms: Terms,
        *,
        policy: Policy | None = None,
        seats: int = 1,
    ) -> None:
        """``seats``: of each worker."""
        self.arrivals = arrivals
        """In order."""
        self.workers = [
            Worker(f"w{host}#{seat}", host) for host in range(workers) for seat in range(seats)
        ]
        self.load_s, self.terms = load_s, terms
        self.now_s = 0.0
        self.lines: dict[str, deque[Job]] = {model: deque() for model in load_s}
        self.left_at_s = dict.fromkeys(load_s, 0.0)
        """When the last worker of a model changed."""
        self.longest_unserved_s = 0.0
        """How long a line waited at most, from its first job or its worker's change, until it had a
        worker again."""
        self.ended: list[Job] = []
        self.reasons: Counter[str] = Counter()
        self._policy = policy or Simulation.by_rule
        self._next = 0

    @property
    def changes(self) -> int:
        """Loads besides the first of each worker."""
        return sum(max(0, worker.loads.total() - 1) for worker in self.workers)

    def by_rule(self) -> Change | None:
        return next_change(self.notes(), self.waiting(), self.terms)

    def notes(self) -> list[Note]:
        return [
            Note(
                worker=worker.name,
                resident=worker.resident,
                load_s={m: took for m, took in self.load_s.items() if m not in others},
                kept_s=self.now_s - worker.since_s,
                left_s=0.0 if worker.running is None else worker.running.left_s,
            )
            for worker in self.workers
            for others in (self.beside(worker),)
        ]

    def beside(self, worker: Worker) -> set[str | None]:
        """The models of the worker's other seats."""
        return {
            each.resident
            for each in self.workers
            if each.host == worker.host and each is not worker
        }

    def waiting(self) -> dict[str, Waiting]:
        return {
            model: Waiting(
                {"normal": sum(job.left_s for job in line)}, unserved_s=self.unserved_s(model)
            )
            for model, line in self.lines.items()
            if line
        }

    def to_come(self) -> Iterator[Job]:
        """The jobs that nobody but the farsighted knows of yet."""
        return islice(self.arrivals, self._next, None)

    def unserved_s(self, model: str) -> float:
        line = self.lines[model]
        return self.now_s - max(line[0].came_s, self.left_at_s[model]) if line else 0.0

    def run(self, until_s: float = float("inf")) -> Simulation:
        """Until all jobs have ended."""
        while self.now_s < until_s and len(self.ended) < len(self.arrivals):
            while (
                self._next < len(self.arrivals) and self.arrivals[self._next].came_s <= self.now_s
            ):
                job = self.arrivals[self._next]
                self.lines[job.model].append(job)
                self._next += 1
            # Those that look later see what the first have noted.
            while (change := self._policy(self)) is not None:
                self._begin(change)
            for worker in self.workers:
                self._compute(worker)
            self.now_s += TICK_S
            self._note_unserved()
            self._pass_idle_time()
        return self

    def _pass_idle_time(self) -> None:
        idle = not any(self.lines.values()) and not any(each.running for each in self.workers)
        if idle and self._next < len(self.arrivals):
            ticks = int((self.arrivals[self._next].came_s - self.now_s) / TICK_S)
            self.now_s += max(0, ticks) * TICK_S

    def _begin(self, change: Change) -> None:
        worker = next(each for each in self.workers if each.name == change.worker)
        assert self.now_s >= worker.since_s
        assert change.model not in self.beside(worker)
        if worker.running is not None:
            self.lines[worker.running.model].appendleft(worker.running)
            worker.running = None
        before, worker.resident = worker.resident, change.model
        worker.since_s = self.now_s + self.load_s[change.model]
        if before is not None and not self._is_served(before):
            self.left_at_s[before] = self.now_s
        worker.loads[change.model] += 1
        self.reasons[change.reason] += 1

    def _compute(self, worker: Worker) -> None:
        at_s = max(self.now_s, worker.since_s)
        while worker.resident is not None and at_s < self.now_s + TICK_S:
            line = self.lines[worker.resident]
            if worker.running is None and not line:
                return
            job = worker.running = worker.running or line.popleft()
            job.began_s = at_s if job.began_s is None else job.began_s
            spent_s = min(job.left_s, self.now_s + TICK_S - at_s)
            job.left_s -= spent_s
            at_s += spent_s
            if job.left_s <= 1e-9:
                job.ended_s, worker.running = at_s, None
                self.ended.append(job)

    def _is_served(self, model: str) -> bool:
        """Whether a worker has loaded it."""
        return any(each.resident == model and self.now_s >= each.since_s for each in self.workers)

    def _note_unserved(self) -> None:
        for model in self.lines:
            if not self._is_served(model):
                self.longest_unserved_s = max(self.longest_unserved_s, self.unserved_s(model))


class Farsighted:
    """Belady's MIN (1966), among the policies that leave no worker idle while jobs wait for a load
    and that bound waits as the rule does. It knows the trace: of several workers that have nothing
    left the one changes whose own next job comes last, and to the model with most to do until
    another change would pay.
    """

    def __call__(self, simulation: Simulation) -> Change | None:
        chosen = simulation.by_rule()
        if chosen is None or chosen.reason != "idle":
            return chosen
        kept = {each.resident for each in simulation.workers}
        waiting = simulation.waiting()
        wanted = [model for model in waiting if model not in kept]
        idle = [
            each
            for each in simulation.notes()
            if each.left_s == 0
            and each.resident not in waiting
            and each.kept_s >= simulation.terms.min_resident_s
        ]
        if not wanted:
            return chosen
        note = max(idle, key=lambda each: self._next_s(simulation, each.resident))
        model = max(wanted, key=lambda each: self._soon_s(simulation, each))
        return Change(note.worker, model, "idle")

    def _next_s(self, simulation: Simulation, model: str | None) -> float:
        return next((job.came_s for job in simulation.to_come() if job.model == model), math.inf)

    def _soon_s(self, simulation: Simulation, model: str) -> float:
        until_s = simulation.now_s + simulation.load_s[model] + simulation.terms.min_resident_s
        come = takewhile(lambda job: job.came_s < until_s, simulation.to_come())
        waits_s = sum(job.left_s for job in simulation.lines[model])
        return waits_s + sum(job.left_s for job in come if job.model == model)


def fixed_to(models: Sequence[str]) -> Policy:
    """A policy of workers that each keep one of ``models``."""

    def policy(simulation: Simulation) -> Change | None:
        for worker, model in zip(simulation.workers, models, strict=True):
            if worker.resident is None:
                return Change(worker.name, model, "first")
        return None

    return policy


def zipf_arrivals(
    random_: random.Random,
    models: Sequence[str],
    jobs: int,
    *,
    load: float,
    favourite_s: float,
    mean_work_s: float = 1.0,
) -> list[Job]:
    """Jobs that come at random, of the models by Zipf's law; the favourite is another one every
    ``favourite_s``. ``load``: how many seconds of work come a second."""
    weights = [1 / rank for rank in range(1, len(models) + 1)]
    gaps = (random_.expovariate(load / mean_work_s) for _ in range(jobs))
    arrivals = []
    for came_s in accumulate(gaps):
        first = int(came_s / favourite_s) % len(models)
        in_order = [*models[first:], *models[:first]]
        [model] = random_.choices(in_order, weights)
        arrivals.append(Job(model, came_s, random_.expovariate(1 / mean_work_s)))
    return arrivals
