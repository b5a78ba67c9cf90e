"""The registry: which workers live, which models they serve, and what they do.

A worker is named by its place, ``llorch.<model>@gpu0.host``. For each model a sorted set says when
each of its workers was last seen; who was seen within ``GONE_AFTER_S`` lives, for all who ask.
Beside it each living worker has a card.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import redis
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    TypeAdapter,
    field_validator,
)

from llorch_worker.broker import keys
from llorch_worker.broker.connections.clock import now_ms
from llorch_worker.broker.connections.url import in_brackets
from llorch_worker.broker.fleet import stored
from llorch_worker.broker.fleet.recent_jobs import RecentJobs
from llorch_worker.broker.queues import place_of
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import TASK_NAME
from llorch_worker.contract.generation_config import checked

ANNOUNCE_INTERVAL_S = 5.0
WHOLE_EVERY = 6
"""One announcement of so many also renews the model's card."""
LATE_S = 2.0
"""A worker is silent once its next announcement is overdue by this much."""
GONE_AFTER_S = 16
"""A worker that misses three announcements is gone."""
_GONE_MS = 1000 * (GONE_AFTER_S + 1)
"""A second more, because :func:`living` counts whole ones."""
AWAITED_S = 600
"""How long jobs wait for a worker with a larger context than the others, once it was last seen."""
REMEMBERED_S = 24 * 3600
"""How long a worker that is gone is still known."""
MOST_REMEMBERED = 1_000
MOST_ASKED = 64


Count = Annotated[int, Field(ge=0, le=10**15)]
CheckedConfig = Annotated[dict[str, Any], AfterValidator(lambda given: checked(given)[0])]
Tasks = Annotated[
    tuple[Annotated[str, Field(max_length=100, pattern=r"^[a-z.]+$")], ...], Field(max_length=20)
]
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
    tenant_weights: str = ""
    """``acme=3,beta=2``: the shares of tenants that have not 1, for ``lua/parts/score.lua``.
    Likewise."""
    last_seen: float
    """Unix time by the clock of the worker that wrote it."""
    generation_config: CheckedConfig = Field(default_factory=dict)
    """How its makers sample from it, as far as their files say."""
    tasks: Tasks = (TASK_NAME,)
    """Those that it runs."""
    created: Count | None = None
    """Unix time at which a worker first announced it; None before Redis has the card. The last
    field: see ``lua/announce.lua``."""


class WorkerCard(_Card):
    """A live worker; ``engine`` holds the figures of ``inspect stats``."""

    hostname: str
    pid: int
    model: str
    fingerprint: str = ""
    """Of what decides the model's text: see :func:`llorch_worker.weights.fingerprint`. Empty before
    its first load."""
    models: tuple[str, ...] = ()
    """All that it loads as jobs ask for them, ``model`` among them; empty if it has that alone."""
    max_context: Count
    max_sequences: Count
    queue_limit: Count = 0
    tenant_weights: str = ""
    generation_config: CheckedConfig = Field(default_factory=dict)
    tasks: Tasks = (TASK_NAME,)
    device: str
    started_at: float
    last_seen: float
    engine: dict[str, Any]
    recent: RecentJobs = RecentJobs()
    last_death: Annotated[str, Field(max_length=1_000)] | None = None
    """Why its engine died last, if it did."""
    last_death_at: float | None = None
    """Unix time."""
    away: Annotated[str, Field(max_length=1_000)] | None = None
    """Why it has no engine now, and when the next one starts."""
    loading: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}
    """The models that it loads now, and the share of their bytes that is there."""
    reload: Annotated[str, Field(max_length=1_000)] | None = None
    """What it does to get new weights, or why it keeps the old ones."""
    engine_pid: Annotated[int, Field(ge=1)] | None = None
    """The engine's process, on the worker's machine."""
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
    def served(self) -> tuple[str, ...]:
        """The models that it has loaded, or loads once their jobs wait."""
        return self.models or (self.model,)

    @property
    def set_aside(self) -> frozenset[str]:
        """The models that did not load there, and are not tried now."""
        said = self.engine.get("set_aside")
        return frozenset(map(str, said)) if isinstance(said, dict) else frozenset()

    @property
    def metrics_address(self) -> str | None:
        """``host:port``, for Prometheus."""
        if self.metrics_host is None or self.metrics_port is None:
            return None
        return f"{in_brackets(self.metrics_host)}:{self.metrics_port}"

    @property
    def awaits_first_load(self) -> bool:
        """Whether it has loaded nothing yet, and so has no fingerprint to compare."""
        return not self.fingerprint and bool(self.away)

    @property
    def died_s(self) -> float:
        """Seconds since its engine died last; infinite if its first one lives."""
        at = self.last_death_at
        return math.inf if at is None else max(0.0, time.time() - at)

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
    def memory_bytes(self) -> int:
        """What the model and its cache take on the device; 0 if the worker does not say."""
        parts = self.engine.get("bytes")
        held = parts.values() if isinstance(parts, dict) else ()
        return sum(int(size) for size in held if isinstance(size, int | float) and size >= 0)

    @property
    def late_s(self) -> float:
        """How much longer than it may a model waits for a worker, if all have jobs; 0 if none
        does."""
        said = self.engine.get("late_s")
        return said if isinstance(said, int | float) else 0.0

    @property
    def weakens(self) -> tuple[str, ...]:
        """Which promises its engine does not keep: see :class:`.ModelFacts`."""
        said = self.engine.get("weakens")
        return tuple(map(str, said)) if isinstance(said, list | tuple) else ()

    @property
    def silent(self) -> bool:
        """A killed worker stays listed until its announcement expires."""
        return time.time() - self.last_seen > ANNOUNCE_INTERVAL_S + LATE_S


def announce(
    client: redis.Redis, card: WorkerCard, *, whole: bool = True, leaving: bool = False
) -> WorkerCard | None:
    """Notes that the worker lives, with its card. The ``whole``, also the model's card, is written
    too if Redis has no card of the worker. One that is ``leaving`` counts as gone.

    Returns the previous card under the worker's name.
    """
    model = ModelCard(
        name=card.model,
        max_context=card.max_context,
        queue_limit=card.queue_limit,
        tenant_weights=card.tenant_weights,
        generation_config=card.generation_config,
        tasks=card.tasks,
        last_seen=time.time(),
    )
    place = place_of(card.model, card.hostname)
    documents = [card.model_dump_json(), model.name, model.model_dump_json(exclude={"created"})]
    replaced = run_script(
        client,
        "announce",
        [
            place,
            GONE_AFTER_S,
            int(whole),
            *documents,
            _GONE_MS if leaving else 0,
            REMEMBERED_S * 1000,
            MOST_REMEMBERED,
            card.max_context,
        ],
        [keys.live(card.model), keys.worker(place), keys.contexts(card.model)],
    )
    return None if replaced is None else stored.read(WorkerCard, replaced)


def announce_model(client: redis.Redis, card: ModelCard) -> None:
    """Notes that jobs of a model may be sent, although no worker may have it loaded now."""
    known = client.hget(keys.MODELS, card.name)
    before = None if known is None else stored.read(ModelCard, str(known))
    created = int(time.time()) if before is None else before.created
    # The time of its first announcement comes last: see ``lua/announce.lua``.
    client.hset(
        keys.MODELS, card.name, card.model_copy(update={"created": created}).model_dump_json()
    )
    # Its worker may load it for a job that fits into no other's context.
    client.zadd(keys.contexts(card.name), {str(card.max_context): now_ms(client)})


def withdraw(client: redis.Redis, model: str, hostname: str) -> None:
    """Notes that a worker is gone. Its model stays known, so that jobs may wait for another."""
    place = place_of(model, hostname)
    with client.pipeline(transaction=False) as pipe:
        pipe.delete(keys.worker(place))
        pipe.zincrby(keys.live(model), -_GONE_MS, place)
        pipe.execute()


def models(client: redis.Redis) -> dict[str, ModelCard]:
    """Every model ever served at this Redis, by name."""
    documents = client.hgetall(keys.MODELS)
    cards = {str(name): stored.read(ModelCard, text) for name, text in documents.items()}
    return {name: card for name, card in cards.items() if card is not None}


def workers(client: redis.Redis) -> list[WorkerCard]:
    """The workers that are alive now, by hostname."""
    known = (place for places in remembered(client).values() for place in places)
    return sorted(cards(client, known), key=lambda card: card.hostname)


def count_serving(cards: Iterable[WorkerCard], model: str) -> int:
    """How many workers serve the model. One that keeps several models has a card for each."""
    return len({card.hostname for card in cards if model in card.served})


def cards(client: redis.Redis, places: Iterable[str]) -> list[WorkerCard]:
    """Those of the workers at these places that have one."""
    names = list(map(keys.worker, places))
    documents = client.mget(names) if names else []
    found = [stored.read(WorkerCard, text) for text in documents if text is not None]
    return [card for card in found if card is not None]


def living(client: redis.Redis, model: str) -> list[str]:
    """The places of the workers that serve ``model`` now."""
    return living_of(client, [model])[model]


def living_of(client: redis.Redis, models: Iterable[str]) -> dict[str, list[str]]:
    """The places of the workers that serve each of these models now, the last seen last."""
    return _seen_within(client, models, GONE_AFTER_S)


def is_alone(client: redis.Redis, model: str) -> bool:
    """Whether one worker serves ``model`` now, or none does, as the one that was seen last knows
    it."""
    last: Any = client.zrevrange(keys.live(model), 0, 1, withscores=True)
    return len(last) < 2 or last[0][1] - last[1][1] > 1e3 * GONE_AFTER_S


def _seen_within(
    client: redis.Redis, models: Iterable[str], since_s: float
) -> dict[str, list[str]]:
    if not (names := list(models)):
        return {}
    oldest_ms = now_ms(client) - round(1e3 * since_s)
    with client.pipeline(transaction=False) as pipe:
        for model in names:
            pipe.zrangebyscore(keys.live(model), oldest_ms, "+inf")
        return dict(zip(names, (list(map(str, found)) for found in pipe.execute()), strict=True))


class Pace(NamedTuple):
    """What the workers of a model can do for jobs that wait; of a large fleet, as much as a sample
    of them suggests."""

    free: float
    """How many more jobs have room now."""
    jobs_per_min: float
    """How many have ended a minute lately."""


def pace(client: redis.Redis, model: str) -> Pace:
    places = living(client, model)
    asked = cards(client, places[:MOST_ASKED])
    share = len(places) / max(1, len(asked))
    taken = (card.engine.get("running", 0) + card.engine.get("waiting", 0) for card in asked)
    free = sum(max(0, card.max_sequences - used) for card, used in zip(asked, taken, strict=True))
    return Pace(free * share, sum(card.recent.jobs_per_min for card in asked) * share)


def takers(client: redis.Redis, model: str) -> list[WorkerCard]:
    """The workers of ``model`` that take jobs: none that is silent or leaves."""
    seen = _seen_within(client, [model], ANNOUNCE_INTERVAL_S + LATE_S)
    return cards(client, seen[model])


def largest_context(client: redis.Redis, model: str, since_s: float = REMEMBERED_S) -> int:
    """The largest that a worker of ``model`` had within the last day, or since then; 0 if none
    did."""
    oldest_ms = now_ms(client) - round(1e3 * since_s)
    found = client.zrangebyscore(keys.contexts(model), oldest_ms, "+inf")
    return max((int(str(each)) for each in found), default=0)


def remembered(client: redis.Redis) -> dict[str, list[str]]:
    """Every model ever served, and the places of the workers that served it within the last day."""
    models = list(map(str, client.hkeys(keys.MODELS)))
    with client.pipeline(transaction=False) as pipe:
        for model in models:
            pipe.zrange(keys.live(model), 0, -1)
        return dict(zip(models, (list(map(str, names)) for names in pipe.execute()), strict=True))
