"""The rule by which the workers of several models decide what each keeps resident.

Pure: it knows neither Redis nor a clock. Every worker looks at the same notes of all and finds the
one change that helps the fleet most now. It makes this change only if the change is its own, so two
workers never move for one job's sake. docs/SCALING.md says the rule in words.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from llorch_worker.broker.fleet.residents import Note

Reason = Literal["wait", "idle", "backlog", "first", "asked"]
"""Why a model is loaded. ``wait``: its oldest job has waited for so long as one may; ``idle``: the
worker had nothing left to do; ``backlog``: it has far more to do; ``first``: the worker had none.
``asked``: a person wanted it, and no rule.
"""

WORTH: Final = {"high": 4.0, "normal": 1.0, "low": 0.25}
"""How much a second of work of a priority counts."""
FAR_MORE: Final = 2.0
"""A change for a backlog pays at least so many times what it costs. A smaller factor changes more
often, for gains that the next jobs may undo."""


@dataclass(frozen=True)
class Waiting:
    """What waits for one model."""

    work_s: Mapping[str, float]
    """By priority: how long one engine takes for these jobs, from their expected tokens and the
    measured rate."""
    unserved_s: float = 0.0
    """How long the oldest has waited without a worker that keeps the model: since it came, or since
    the last such worker changed."""
    slack_s: float = math.inf
    """The least time to a deadline of these jobs, less what such a job takes."""

    @property
    def worth_s(self) -> float:
        """The work, weighted by priority."""
        return sum(WORTH[priority] * work_s for priority, work_s in self.work_s.items())


@dataclass(frozen=True)
class Terms:
    max_wait_s: float
    min_resident_s: float
    look_s: float = 1.0
    """How often each worker looks."""


@dataclass(frozen=True)
class Change:
    """A worker's next model."""

    worker: str
    model: str
    reason: Reason
    patience_s: float = field(default=0.0, compare=False)
    """How long the worker's running jobs may still take before they are handed back."""


def next_change(
    notes: Sequence[Note], waiting: Mapping[str, Waiting], terms: Terms
) -> Change | None:
    """The change that helps the fleet most now; None if none is worth what it costs."""
    fleet = _Fleet(notes, waiting, terms)
    return fleet.for_wait() or fleet.for_backlog()


def rotation_s(models: int, workers: int, load_s: float, terms: Terms) -> float:
    """How long a model waits for a worker if all of these always have jobs: for the others that
    share one with it. If this is more than ``max_wait_s``, no rule can hold that."""
    sharing = math.ceil(models / max(1, workers))
    return (sharing - 1) * (load_s + terms.min_resident_s)


class _Fleet:
    def __init__(self, notes: Sequence[Note], waiting: Mapping[str, Waiting], terms: Terms) -> None:
        self._waiting = {name: each for name, each in waiting.items() if each.worth_s > 0}
        self._terms = terms
        self._keepers = Counter(note.resident for note in notes)
        self._changing = [note for note in notes if not note.pinned]
        self._kept = {note.worker: note.resident for note in notes}
        self._load_s: dict[str, float] = {}
        for note in self._changing:
            for name, load_s in note.load_s.items():
                self._load_s[name] = min(load_s, self._load_s.get(name, math.inf))
        self._free_s = {note.worker: self._free_within_s(note) for note in self._changing}
        unkept = [name for name in self._load_s if not self._keepers[name]]
        self._begin_s = {name: self._begin_within_s(name) for name in unkept}
        """By model without a worker: when the load of one must begin."""

    def for_wait(self) -> Change | None:
        """For the model without a worker whose jobs have waited longest, of those that a free
        worker can load, if one look later some would wait too long."""
        wanted = sorted(self._waiting.keys() & self._begin_s, key=self._order)
        later_s = {name: max(free_s, self._terms.look_s) for name, free_s in self._free_s.items()}
        begin_s = dict(self._begin_s)
        for model in wanted:
            if self._in_time(later_s, begin_s, self._kept):
                return None
            free = [note for note in self._free() if model in note.load_s]
            if free:
                return self._change(min(free, key=self._loss), model, "wait", 0.0)
            del begin_s[model]  # it waits for another worker
        return None

    def for_backlog(self) -> Change | None:
        """For the model with most to do, if a worker has nothing left, or far less."""
        changes = [
            (gain_s, self._loss(note), name, note)
            for note in self._free()
            for name in self._waiting
            if name != note.resident
            and name in note.load_s
            and (gain_s := self._gain_s(note, name)) > 0
        ]
        for _, _, name, note in sorted(changes, key=lambda each: (-each[0], *each[1:3])):
            if self._leaves_time(note, name):
                reason: Reason = "backlog" if self._stays_s(note) else "idle"
                return self._change(note, name, reason, self._begin_within_s(name))
        return None

    def _gain_s(self, note: Note, name: str) -> float:
        """Positive if the worker should load the model."""
        keepers = self._keepers[name]
        worth_s = self._waiting[name].worth_s
        cost_s = note.load_s[name] + note.lost_s
        stays_s = self._stays_s(note)
        if not stays_s and not keepers:
            return worth_s
        # Those that keep it would be done before its load had paid.
        return worth_s / (keepers + (stays_s > 0)) - FAR_MORE * (stays_s + cost_s)

    def _leaves_time(self, note: Note, name: str) -> bool:
        """Whether all others still come in time if the worker loads the model: also those without
        jobs, of which one may come the next moment. Where that cannot be, those with jobs."""
        begin_s = {other: within_s for other, within_s in self._begin_s.items() if other != name}
        if note.resident in self._load_s and self._keepers[note.resident] == 1:
            begin_s[note.resident] = self._begin_within_s(note.resident, leaves=True)
        busy_s = note.load_s[name] + self._terms.min_resident_s
        kept = self._kept | {note.worker: name}
        free_s = self._free_s | {note.worker: busy_s}
        if self._in_time(free_s, begin_s, kept):
            return True
        longest_s = max(self._load_s.values())
        stay = {each for name, each in self._kept.items() if name not in self._free_s}
        in_turn = len(self._load_s.keys() - stay)
        rotation = rotation_s(in_turn, len(self._changing), longest_s, self._terms)
        if rotation <= self._terms.max_wait_s:
            return False
        with_jobs = {other: begin_s[other] for other in begin_s.keys() & self._waiting}
        return self._in_time(free_s, with_jobs, {})

    def _in_time(
        self,
        free_s: Mapping[str, float],
        begin_s: Mapping[str, float],
        kept: Mapping[str, str | None],
    ) -> bool:
        """Whether the workers, free after so long, can load all these models in time, one after the
        other, the most urgent first. A model whose last worker changes then, of those that ``kept``
        names, has to come back in time, too."""
        free_s, kept = dict(free_s), dict(kept)
        due = [(within_s, name) for name, within_s in begin_s.items()]
        heapq.heapify(due)
        came_back: set[str] = set()
        while due:
            within_s, name = heapq.heappop(due)
            worker = min(free_s, key=lambda each: (free_s[each], each))
            at_s = free_s[worker]
            if at_s > within_s:
                return False
            left = kept.get(worker)
            kept[worker] = name
            free_s[worker] = at_s + self._load_s[name] + self._terms.min_resident_s
            if left in self._load_s and left not in kept.values() and left not in came_back:
                came_back.add(left)
                heapq.heappush(due, (at_s + self._terms.max_wait_s, left))
        return True

    def _free(self) -> list[Note]:
        return [note for note in self._changing if self._free_s[note.worker] <= 0]

    def _free_within_s(self, note: Note) -> float:
        """When the worker may change."""
        if note.resident is None:
            return 0.0
        # A load is not given up.
        least_s = self._terms.min_resident_s
        return max(0.0, least_s - note.kept_s)

    def _stays_s(self, note: Note) -> float:
        """How long the worker has to do if it keeps its model."""
        if note.resident is None:
            return 0.0
        waiting = self._waiting.get(note.resident)
        share_s = 0.0 if waiting is None else waiting.worth_s / self._keepers[note.resident]
        return share_s + note.left_s

    def _loss(self, note: Note) -> tuple[float, float, str]:
        """Who changes first: the worker with least to do, then the one that kept its model
        longest."""
        return self._stays_s(note) + note.lost_s, -note.kept_s, note.worker

    def _order(self, name: str) -> tuple[float, str]:
        return self._begin_s[name], name

    def _begin_within_s(self, name: str, *, leaves: bool = False) -> float:
        """When a worker must begin to load the model; ``leaves``: if its last one changes now."""
        waiting = self._waiting.get(name, Waiting({}))
        within_s = self._terms.max_wait_s - (0.0 if leaves else waiting.unserved_s)
        by_deadline_s = waiting.slack_s - self._load_s.get(name, 0.0)
        # One that is missed in any case hurries nobody.
        return min(within_s, by_deadline_s) if by_deadline_s >= 0 else within_s

    def _change(self, note: Note, name: str, reason: Reason, patience_s: float) -> Change:
        if note.resident is None:
            reason = "first"
        return Change(note.worker, name, reason, max(0.0, patience_s))
