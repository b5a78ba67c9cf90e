"""What the console's page reads: figures, names and ids; no content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import BaseModel

from llorch_worker.broker.figures.fleet import Fleet, ModelLoad
from llorch_worker.broker.figures.history import Point
from llorch_worker.broker.figures.listed_jobs import ListedJob
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.broker.jobs.dead_letters import DeadLetter
from llorch_worker.broker.jobs.ended_jobs import EndedJob
from llorch_worker.broker.waiting.waiting import Queue
from llorch_worker.contract import Priority


class Session(BaseModel):
    """Who sent a request. ``needs_key``: the gateway has keys."""

    needs_key: bool
    signed_in: bool
    name: str = ""
    operator: bool = False


class Worker(BaseModel):
    """A worker's card. ``age_s``: how old its figures are, by the gateway's clock; ``silent``: too
    old. Tokens are those of the prompts of its last jobs."""

    hostname: str
    model: str
    models: tuple[str, ...]
    """Those that it serves."""
    device: str
    max_sequences: int
    up_s: float
    age_s: float
    silent: bool
    away: str | None
    """Why it has no engine now."""
    reload: str | None
    running: int
    waiting: int
    tokens_per_s: float
    kv_blocks_total: int
    kv_blocks_used: int
    prompt_tokens: int
    cached_tokens: int
    """How many of them were found in the KV cache."""
    memory_bytes: int
    """What weights, cache and tables take on its device; 0 if it does not say."""
    last_death: str | None
    """Why its engine died last."""
    died_s: float | None
    """How long ago that was."""

    @classmethod
    def of(cls, card: WorkerCard, now_s: float) -> Worker:
        return cls(
            hostname=card.hostname,
            model=card.model,
            models=card.served,
            device=card.device,
            max_sequences=card.max_sequences,
            up_s=max(0.0, now_s - card.started_at),
            age_s=max(0.0, now_s - card.last_seen),
            silent=card.silent,
            away=card.away,
            reload=card.reload,
            running=card.running,
            waiting=card.waiting,
            tokens_per_s=card.tokens_per_s,
            kv_blocks_total=card.kv_blocks,
            kv_blocks_used=card.kv_blocks_used,
            prompt_tokens=card.recent.prompt_tokens,
            cached_tokens=card.recent.cached_tokens,
            memory_bytes=card.memory_bytes,
            last_death=card.last_death,
            died_s=None if card.last_death_at is None else card.died_s,
        )


class Model(BaseModel):
    """What one model has to do; the fields of :class:`ModelLoad`."""

    model: str
    queues: dict[Priority, Queue]
    suspects: int
    scheduled: int
    workers: int
    slots: int
    running: int
    orphaned: int
    preempting: int
    waiting: int
    saturation: float | None
    fingerprints: dict[str, int]

    @classmethod
    def of(cls, load: ModelLoad) -> Model:
        return cls(**{name: getattr(load, name) for name in cls.model_fields})


class Pulse(BaseModel):
    """What every view of the page shows."""

    dead_letters: int
    version: str
    """Another one when the list of dead letters has changed."""


class Totals(BaseModel):
    """All workers together."""

    workers: int
    silent: int
    running: int
    slots: int
    waiting: int
    oldest_s: float | None
    tokens_per_s: float
    kv_blocks_total: int
    kv_blocks_used: int
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, fleet: Fleet) -> Totals:
        queues = [queue for load in fleet.models for queue in load.queues.values()]
        ages = [queue.oldest_s for queue in queues if queue.oldest_s is not None]
        cards = fleet.workers
        return cls(
            workers=fleet.worker_count,
            silent=sum(card.silent for card in cards),
            running=sum(load.running for load in fleet.models),
            slots=sum(load.slots for load in fleet.models),
            waiting=sum(load.waiting for load in fleet.models),
            oldest_s=max(ages, default=None),
            tokens_per_s=sum(card.tokens_per_s for card in cards),
            kv_blocks_total=sum(card.kv_blocks for card in cards),
            kv_blocks_used=sum(card.kv_blocks_used for card in cards),
            prompt_tokens=sum(card.recent.prompt_tokens for card in cards),
            cached_tokens=sum(card.recent.cached_tokens for card in cards),
        )


class FleetDocument(BaseModel):
    totals: Totals
    models: list[Model]
    workers: list[Worker]
    """Those that were asked for."""
    matching: int
    """How many workers match the filter; ``workers`` has the first of them."""
    unserved: dict[str, int]
    """Queues of unknown models or workers, with their jobs."""

    @classmethod
    def of(
        cls, fleet: Fleet, now_s: float, words: Sequence[str], order: str, most: int
    ) -> FleetDocument:
        """``words``: what a worker's name, model or device must hold; ``order``: of
        :data:`WORKER_ORDERS`; ``most``: so many workers."""
        found = [card for card in fleet.workers if _matches(card, words)]
        found.sort(key=WORKER_ORDERS[order])
        return cls(
            totals=Totals.of(fleet),
            models=[Model.of(load) for load in fleet.models],
            workers=[Worker.of(card, now_s) for card in found[:most]],
            matching=len(found),
            unserved=dict(fleet.unserved),
        )


WORKER_ORDERS: Mapping[str, Callable[[WorkerCard], float | str]] = {
    "name": lambda card: card.hostname,
    "load": lambda card: -card.load,
    "rate": lambda card: -card.tokens_per_s,
    "kv": lambda card: -(card.kv_used or 0),
    "hits": lambda card: -(card.recent.cache_hits or 0),
    "up": lambda card: -card.started_at,
}


def _matches(card: WorkerCard, words: Sequence[str]) -> bool:
    about = f"{card.hostname} {' '.join(card.served)} {card.device}".lower()
    return all(word in about for word in words)


class History(BaseModel):
    points: list[Point]


class Jobs(BaseModel):
    """A page of the jobs that have not ended, and how many there are in all."""

    running: int
    waiting: int
    scheduled: int
    jobs: list[ListedJob]
    whole: bool
    """Whether a filter looked at all of them."""


class EndedJobs(BaseModel):
    jobs: list[EndedJob]


class Letter(BaseModel):
    """A dead letter without its message."""

    id: str
    model: str
    reason: str
    attempts: int
    workers: list[str]
    """Those that died with the job, in order."""
    died_at: float
    """Unix time by Redis' clock."""
    message_bytes: int
    retriable: bool

    @classmethod
    def of(cls, letter: DeadLetter, living: Mapping[str, float]) -> Letter:
        return cls(
            id=letter.id,
            model=letter.model,
            reason=letter.reason,
            attempts=letter.attempts,
            workers=letter.lost_workers(living),
            died_at=letter.died_ms / 1e3,
            message_bytes=letter.message_bytes,
            retriable=letter.retriable,
        )


class Letters(BaseModel):
    """The newest letters; ``total`` counts all. A later ``version`` may have them already."""

    total: int
    version: str
    letters: list[Letter]
