"""What the console's page reads: figures, names and ids; no content."""

from __future__ import annotations

from pydantic import BaseModel

from llorch_worker.broker.dead_letters import DeadLetter
from llorch_worker.broker.ended_jobs import EndedJob
from llorch_worker.broker.fleet import Fleet, ModelLoad, Queue
from llorch_worker.broker.registry import WorkerCard
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
    device: str
    max_sequences: int
    up_s: float
    age_s: float
    silent: bool
    running: int
    waiting: int
    tokens_per_s: float
    kv_blocks_total: int
    kv_blocks_used: int
    prompt_tokens: int
    cached_tokens: int
    """How many of them were found in the KV cache."""

    @classmethod
    def of(cls, card: WorkerCard, now_s: float) -> Worker:
        return cls(
            hostname=card.hostname,
            model=card.model,
            device=card.device,
            max_sequences=card.max_sequences,
            up_s=max(0.0, now_s - card.started_at),
            age_s=max(0.0, now_s - card.last_seen),
            silent=card.silent,
            running=card.running,
            waiting=card.waiting,
            tokens_per_s=card.tokens_per_s,
            kv_blocks_total=card.kv_blocks,
            kv_blocks_used=card.kv_blocks_used,
            prompt_tokens=card.recent.prompt_tokens,
            cached_tokens=card.recent.cached_tokens,
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
    preempting: int
    waiting: int
    saturation: float | None
    fingerprints: dict[str, int]

    @classmethod
    def of(cls, load: ModelLoad) -> Model:
        return cls(**{name: getattr(load, name) for name in cls.model_fields})


class DeadLetters(BaseModel):
    count: int
    version: str
    """Another one when their list has changed."""


class FleetDocument(BaseModel):
    models: list[Model]
    workers: list[Worker]
    unserved: dict[str, int]
    """Queues of unknown models or workers, with their jobs."""
    dead_letters: DeadLetters

    @classmethod
    def of(cls, fleet: Fleet, letters_version: str, now_s: float) -> FleetDocument:
        return cls(
            models=[Model.of(load) for load in fleet.models],
            workers=[Worker.of(card, now_s) for card in fleet.workers],
            unserved=dict(fleet.unserved),
            dead_letters=DeadLetters(count=fleet.dead_letters, version=letters_version),
        )


class EndedJobs(BaseModel):
    jobs: list[EndedJob]


class Letter(BaseModel):
    """A dead letter without its message."""

    id: str
    model: str
    reason: str
    attempts: int
    workers: list[str]
    """Those that claimed the job, in order."""
    died_at: float
    """Unix time by Redis' clock."""
    message_bytes: int
    retriable: bool

    @classmethod
    def of(cls, letter: DeadLetter) -> Letter:
        return cls(
            id=letter.id,
            model=letter.model,
            reason=letter.reason,
            attempts=letter.attempts,
            workers=[worker for worker, _ in letter.history],
            died_at=letter.died_ms / 1e3,
            message_bytes=letter.message_bytes,
            retriable=letter.retriable,
        )


class Letters(BaseModel):
    """The newest letters; ``total`` counts all. A later ``version`` may have them already."""

    total: int
    version: str
    letters: list[Letter]
