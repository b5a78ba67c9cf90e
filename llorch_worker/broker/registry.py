"""The registry of workers and models: workers write it; clients and operators read it."""

from __future__ import annotations

import time
from typing import Annotated, Any

import redis
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, TypeAdapter, field_validator

from llorch_worker.broker import keys, stored, worker_queues
from llorch_worker.broker.queues import worker_queue
from llorch_worker.broker.recent_jobs import RecentJobs

ANNOUNCE_INTERVAL_S = 5.0
WHOLE_EVERY = 6
"""One announcement of so many also renews the model's card."""
LATE_S = 2.0
"""A worker is silent once its next announcement is overdue by this much."""
WORKER_TTL_S = worker_queues.GONE_AFTER_S


Count = Annotated[int, Field(ge=0, le=10**15)]
_FIGURES = TypeAdapter(dict[str, Annotated[NonNegativeFloat, Field(le=1e15)]])
_COMPUTED_WITH = frozenset(
    ("running", "waiting", "tokens_per_s", "kv_blocks_total", "kv_blocks_free")
)


class _Card(BaseModel):
    # Workers and clients of neighbouring versions read each other's cards.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ModelCard(_Card):
    """A model that a worker serves or has served."""

    name: str
    max_context: Count
    queue_limit: Count = 0
    """The most jobs that may wait; 0 for no limit. The latest worker's setting counts."""
    last_seen: float
    """Unix time by the clock of the worker that wrote it."""


class WorkerCard(_Card):
    """A live worker; ``engine`` holds the figures of ``inspect stats``."""

    hostname: str
    pid: int
    model: str
    max_context: Count
    max_sequences: Count
    queue_limit: Count = 0
    device: str
    started_at: float
    last_seen: float
    engine: dict[str, Any]
    recent: RecentJobs = RecentJobs()
    # Prometheus gets this place: it must not be an URL of somebody's choice.
    metrics_host: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:%-]+$")] | None = None
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Where it serves metrics; None if it does not."""

    @field_validator("engine")
    @classmethod
    def _has_figures(cls, engine: dict[str, Any]) -> dict[str, Any]:
        _FIGURES.validate_python(
            {name: engine[name] for name in _COMPUTED_WITH & engine.keys()}, strict=True
        )
        return engine

    @property
    def metrics_address(self) -> str | None:
        """``host:port``, for Prometheus."""
        if self.metrics_host is None or self.metrics_port is None:
            return None
        host = f"[{self.metrics_host}]" if ":" in self.metrics_host else self.metrics_host
        return f"{host}:{self.metrics_port}"

    @property
    def running(self) -> int:
        return int(self.engine.get("running", 0))

    @property
    def waiting(self) -> int:
        """Sequences that wait in the engine for a free slot or for KV blocks."""
        return int(self.engine.get("waiting", 0))

    @property
    def load(self) -> float:
        """(running + waiting) / slots."""
        return (self.running + self.waiting) / max(1, self.max_sequences)

    @property
    def tokens_per_s(self) -> float:
        return float(self.engine.get("tokens_per_s", 0))

    @property
    def kv_blocks(self) -> int:
        """How many KV blocks it has; 0 if it does not say."""
        return int(self.engine.get("kv_blocks_total", 0))

    @property
    def kv_blocks_used(self) -> int:
        """How many of them sequences hold."""
        return self.kv_blocks - int(self.engine.get("kv_blocks_free", self.kv_blocks))

    @property
    def kv_used(self) -> float | None:
        """The share of the KV blocks that sequences hold; None if the worker does not say."""
        return self.kv_blocks_used / self.kv_blocks if self.kv_blocks else None

    @property
    def silent(self) -> bool:
        """A killed worker stays listed until its announcement expires."""
        return time.time() - self.last_seen > ANNOUNCE_INTERVAL_S + LATE_S


def announce(client: redis.Redis, card: WorkerCard, *, whole: bool = True) -> WorkerCard | None:
    """Writes the card of the worker and marks its worker queue as served. The ``whole``, also the
    model's card and the index of workers, is written too if Redis has no card of the worker.

    Returns the previous card under the worker's name.
    """
    document = card.model_dump_json()
    # redis-py's annotations do not know that this returns the old value.
    replaced: Any = client.set(keys.worker(card.hostname), document, ex=WORKER_TTL_S, get=True)
    if whole or replaced is None:
        model = ModelCard(
            name=card.model,
            max_context=card.max_context,
            queue_limit=card.queue_limit,
            last_seen=time.time(),
        )
        with client.pipeline(transaction=False) as pipe:
            pipe.hset(keys.MODELS, model.name, model.model_dump_json())
            pipe.sadd(keys.WORKERS, card.hostname)
            pipe.execute()
    worker_queues.mark_seen(client, worker_queue(card.model, card.hostname))
    return None if replaced is None else stored.read(WorkerCard, replaced)


def withdraw(client: redis.Redis, hostname: str) -> None:
    """Deletes a worker's card. Its model stays known, so that jobs may wait for another worker."""
    with client.pipeline(transaction=False) as pipe:
        pipe.delete(keys.worker(hostname))
        pipe.srem(keys.WORKERS, hostname)
        pipe.execute()


def models(client: redis.Redis) -> dict[str, ModelCard]:
    """Every model ever served at this Redis, by name."""
    documents = client.hgetall(keys.MODELS)
    cards = {str(name): stored.read(ModelCard, text) for name, text in documents.items()}
    return {name: card for name, card in cards.items() if card is not None}


def workers(client: redis.Redis) -> list[WorkerCard]:
    """The workers that are alive now, by hostname."""
    hostnames = sorted(str(name) for name in client.smembers(keys.WORKERS))
    if not hostnames:
        return []
    documents = client.mget([keys.worker(hostname) for hostname in hostnames])
    gone = [name for name, text in zip(hostnames, documents, strict=True) if text is None]
    if gone:
        client.srem(keys.WORKERS, *gone)
    cards = [stored.read(WorkerCard, text) for text in documents if text is not None]
    return [card for card in cards if card is not None]
