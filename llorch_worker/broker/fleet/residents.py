"""Who keeps which model: the notes of the workers that have several, by which they decide.

A worker of one model writes none. Its card says as much.

A decision counts only if nobody has decided since the notes were read that it follows from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat
from redis import Redis
from redis.exceptions import WatchError

from llorch_worker.broker import keys
from llorch_worker.broker.fleet import registry, stored
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.broker.queues import place_of

GONE_AFTER_S = 16.0
"""A worker that has not renewed its note for so long decides nothing."""
FORGOTTEN_AFTER_S = 3600.0
MOST_FAILURES = 3
"""A model that did not load so often in a row, of which the last time was minutes after the first,
is expected to do so no more. One failure may be that of a file which is being replaced."""
MOST_ALONE = 16
"""How many cards of a model's workers are read. A model with more of its own needs no other."""
_LEFT = "left "


def seat_name(hostname: str, number: int) -> str:
    """The name of a worker's seat in the notes. Each seat has one, as if it were a worker."""
    return f"{hostname}#{number}" if number else hostname


def hostname_of(seat: str) -> str:
    """The worker of a seat."""
    return seat.partition("#")[0]


class Note(BaseModel):
    """A worker's note. Durations are those at the time when it was written."""

    # Workers of neighbouring versions read each other's.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    worker: str
    resident: str | None = None
    """What it has loaded or is loading."""
    kept_s: float = 0.0
    """How long it has kept that; while it loads, how long that still takes, below 0."""
    load_s: Mapping[str, NonNegativeFloat] = Field(default_factory=dict)
    """The models that it can load now, and how long each takes there."""
    job_s: Mapping[str, NonNegativeFloat] = Field(default_factory=dict)
    """How long an engine was busy for a job of a model, where it was measured."""
    left_s: NonNegativeFloat = 0.0
    """How long its running jobs still take."""
    lost_s: NonNegativeFloat = 0.0
    """How long its prefix cache took to compute, which a change throws away."""
    pinned: bool = False
    """Whether it keeps its model in any case."""
    set_aside: Mapping[str, int] = Field(default_factory=dict)
    """The models that it does not try to load now, and how often each has failed in a row."""
    seen_ms: int = 0
    """By Redis' clock."""

    def may_serve(self, model: str) -> bool:
        """Whether it has the model loaded, or will try to load it once its jobs wait."""
        if model in self.set_aside:
            return self.set_aside[model] < MOST_FAILURES
        return self.resident == model or model in self.load_s


@dataclass(frozen=True)
class Notes:
    """All notes at one moment."""

    of_workers: tuple[Note, ...]
    """Those that live, by name, and what those of workers of one model would be."""
    left_s: Mapping[str, float]
    """How long ago the last worker of a model left it."""
    now_ms: int
    decisions: str | None
    """How many there were before."""

    def may_serve(self, model: str) -> bool:
        """Whether a living worker has the model loaded, or may load it."""
        return any(note.may_serve(model) for note in self.of_workers)


def read(client: Redis, models: Iterable[str] = ()) -> Notes:
    """``models``: those of which to find also the workers that have them alone. Raises
    ``RedisError``."""
    with client.pipeline(transaction=False) as pipe:
        pipe.get(keys.RESIDENTS_FENCE)
        pipe.time()
        pipe.hgetall(keys.RESIDENTS)
        decisions, (seconds, microseconds), found = pipe.execute()
    now_ms = 1000 * int(seconds) + int(microseconds) // 1000
    notes = {name: stored.read(Note, text) for name, text in found.items() if _LEFT not in name}
    ages_s = {name: (now_ms - note.seen_ms) / 1e3 for name, note in notes.items() if note}
    forgotten = [name for name in notes if ages_s.get(name, FORGOTTEN_AFTER_S) >= FORGOTTEN_AFTER_S]
    if forgotten:
        client.hdel(keys.RESIDENTS, *forgotten)
    living = {n: note for n, note in notes.items() if note and ages_s[n] < GONE_AFTER_S}
    left_s = {
        name.removeprefix(_LEFT): max(0.0, (now_ms - int(at_ms)) / 1e3)
        for name, at_ms in found.items()
        if name.startswith(_LEFT)
    }
    alone = _alone(client, models, {*map(hostname_of, living)})
    of_workers = sorted([*living.values(), *map(_note_of, alone)], key=lambda note: note.worker)
    return Notes(tuple(of_workers), left_s, now_ms, decisions)


def _alone(client: Redis, models: Iterable[str], noted: Set[str]) -> list[WorkerCard]:
    """Living workers that have one of these models alone, of each model as many as matter. Those of
    the ``noted`` hostnames write notes."""
    found: list[str] = []
    for model, places in registry.living_of(client, models).items():
        known = {place_of(model, name) for name in noted}
        found += [place for place in places if place not in known][-MOST_ALONE:]
    return [card for card in registry.cards(client, found) if not card.models]


def _note_of(card: WorkerCard) -> Note:
    """What the note of a worker of one model would be: it decides nothing, and tries to load its
    model for as long as it lives."""
    keeps = card.away is None or card.model in card.loading
    return Note(
        worker=card.hostname,
        resident=card.model if keeps else None,
        kept_s=0.0 if card.away is None else -1.0,
        load_s={card.model: 0.0},
        pinned=True,
    )


def renew(client: Redis, note: Note, now_ms: int) -> None:
    """Writes the worker's note. Raises ``RedisError``."""
    client.hset(keys.RESIDENTS, note.worker, _written(note, now_ms))


def decide(client: Redis, note: Note, seen: Notes, *, leaves: str | None) -> bool:
    """Writes the note of a worker that has decided to change. ``leaves``: the model that nobody has
    loaded then. False if another has decided since ``seen``. Raises ``RedisError``."""
    with client.pipeline() as pipe:
        try:
            pipe.watch(keys.RESIDENTS_FENCE)
            if pipe.get(keys.RESIDENTS_FENCE) != seen.decisions:
                return False
            pipe.multi()
            pipe.incr(keys.RESIDENTS_FENCE)
            pipe.hset(keys.RESIDENTS, note.worker, _written(note, seen.now_ms))
            if leaves is not None:
                pipe.hset(keys.RESIDENTS, f"{_LEFT}{leaves}", seen.now_ms)
            pipe.execute()
        except WatchError:
            return False
    return True


def withdraw(client: Redis, worker: str) -> None:
    """Removes the note of a worker that ends. Raises ``RedisError``."""
    client.hdel(keys.RESIDENTS, worker)


def _written(note: Note, now_ms: int) -> str:
    return note.model_copy(update={"seen_ms": now_ms}).model_dump_json()
