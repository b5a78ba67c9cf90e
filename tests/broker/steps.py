"""Jobs of the model ``toy``, pushed and claimed without a worker."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import redis

from llorch_worker.broker import keys, queues
from llorch_worker.broker.figures.fleet import ModelLoad, read_fleet
from llorch_worker.broker.fleet.registry import ModelCard
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim, ClaimRequest, ClaimTerms, Taken
from llorch_worker.settings import Settings
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.store import announce_model

SETTINGS = Settings(result_ttl_s=60, stream_ttl_s=60)
TERMS = ClaimTerms(lease_ms=60_000, max_attempts=3, max_deaths=20, result_ttl_s=60, stream_ttl_s=60)


def card(limit: int = 0, name: str = "toy") -> ModelCard:
    return ModelCard(name=name, max_context=4096, queue_limit=limit, last_seen=time.time())


def announce(store: redis.Redis, limit: int = 0, name: str = "toy") -> None:
    """As if a worker with this limit had served the model before."""
    announce_model(store, name, card(limit, name).model_dump_json())


def weigh(store: redis.Redis, weights: str) -> None:
    """As if the model's workers had these weights of tenants."""
    weighed = card().model_copy(update={"tenant_weights": weights})
    announce_model(store, "toy", weighed.model_dump_json())


def note_seen(store: redis.Redis, *places: str, ago_s: float = 0) -> None:
    """As if the workers of these names had announced themselves so long ago, without cards."""
    seconds, _ = store.time()
    for place in places:
        model = queues.model_of(place)
        store.hsetnx(keys.MODELS, model, card(name=model).model_dump_json())
        store.zadd(keys.live(model), {place: (seconds - ago_s) * 1e3})


DAYS_S = 1e6
"""After which nobody remembers a worker."""


def load(store: redis.Redis) -> ModelLoad:
    """What the model has to do now."""
    store.hsetnx(keys.MODELS, "toy", card().model_dump_json())
    (found,) = (each for each in read_fleet(store).models if each.model == "toy")
    return found


def push(store: redis.Redis, *job_ids: str, **headers: str | None) -> None:
    for job_id in job_ids:
        store.lpush(QUEUE, json.dumps(envelope(GOOD_BODY, headers={"id": job_id} | headers)))


def take(store: redis.Redis, terms: ClaimTerms = TERMS, **options: Any) -> list[Claim]:
    return look(store, terms, **options).claims


def look(
    store: redis.Redis,
    terms: ClaimTerms = TERMS,
    *,
    limit: int = 10,
    held: Sequence[Claim] = (),
    worker: str = "w@h",
) -> Taken:
    request = ClaimRequest("toy", queues.queues("toy"), limit, worker, tuple(held))
    return claims.claim(store, request, terms)


def sweep(store: redis.Redis) -> list[str]:
    return claims.sweep(store, lease_ms=TERMS.lease_ms)


def dying_after(script: str) -> AbstractContextManager[Any]:
    """As if the worker died once it has run ``script``."""
    real = claims.run_script

    def run(client: redis.Redis, name: str, *args: Any) -> Any:
        if name != script:
            raise redis.ConnectionError
        return real(client, name, *args)

    return patch.object(claims, "run_script", run)


def claim_on(job_id: str, fence: int = 1) -> Claim:
    """A claim that Redis knows nothing of."""
    return Claim(
        job_id=job_id,
        message=b"",
        attempt=1,
        fence=fence,
        list_key="",
        suspect=False,
        first_claimed_ms=0,
        claimed_ms=0,
    )
