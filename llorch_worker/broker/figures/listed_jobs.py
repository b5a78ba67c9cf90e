"""The jobs that run or wait, for people: whose they are, and none of their content."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Literal

from pydantic import BaseModel
from redis import Redis

from llorch_worker.broker.fleet import registry
from llorch_worker.broker.queues import inbox_of, priority_of
from llorch_worker.broker.scripts import as_bytes, run_script
from llorch_worker.broker.waiting.waiting import Position, positions
from llorch_worker.contract import Priority

MOST_LOOKED = 2_000
"""At so many jobs a call looks, and Redis answers nobody meanwhile: some ms."""


class ListedJob(BaseModel):
    """One that has not ended. Times are ages, by Redis' clock."""

    id: str
    state: Literal["running", "waiting", "scheduled"]
    model: str
    priority: Priority
    tenant: str = ""
    owner: str = ""
    """The gateway's key that sent it."""
    worker: str = ""
    """Of one that runs."""
    attempts: int = 0
    age_s: float | None = None
    """Since it was enqueued; None if its producer wrote no time."""
    runs_s: float | None = None
    """Since a worker first took it."""
    tokens: int | None = None
    """Of one that runs: those that are journalled."""
    place: int | None = None
    """Of one that waits, if it is known; 1 is next."""
    starts_in_s: float | None = None


class Listing(BaseModel):
    running: int
    waiting: int
    scheduled: int
    jobs: list[ListedJob]
    whole: bool
    """Whether all were looked at: of very many, a filter may miss some."""


def listed_jobs(
    client: Redis,
    limit: int,
    *,
    states: Collection[str] = ("running", "waiting"),
    model: str | None = None,
    tenant: str | None = None,
    worker: str | None = None,
    owner: str | None = None,
    ids: Collection[str] | None = None,
) -> Listing:
    """Up to ``limit`` jobs of these ``states``, those that run first, then those that are claimed
    next; of ``ids`` alone, if they are given. ``tenant`` is that or the gateway's key, ``owner``
    only the key. Raises ``RedisError``."""
    models = [name for name in registry.models(client) if model in (None, name)]
    inboxes = [name for each in models for name in inbox_of(each)]
    asked = {
        "limit": limit,
        "most": MOST_LOOKED,
        "running": "running" in states,
        "waiting": "waiting" in states,
        "models": models,
        "model": model,
        "tenant": tenant,
        "worker": worker,
        "owner": owner,
        "ids": None if ids is None else list(ids),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    reply = as_bytes(run_script(client, "list_jobs", [json.dumps(given)], inboxes))
    # A stock producer's id may hold any bytes.
    found = json.loads(reply.decode(errors="replace"))
    jobs = found.get("jobs", ())
    waiting = [job["id"] for job in jobs if job["state"] not in _STATES]
    places = positions(client, waiting)
    return Listing(
        running=found["running"],
        waiting=found["waiting"],
        scheduled=found["scheduled"],
        jobs=[_listed(job, places.get(job["id"]), found["now_ms"]) for job in jobs],
        whole=found["looked"] < MOST_LOOKED,
    )


_STATES: dict[str, Literal["running", "scheduled"]] = {
    "claimed": "running",
    "scheduled": "scheduled",
}


def _listed(job: dict[str, Any], found: Position | None, now_ms: float) -> ListedJob:
    state = _STATES.get(job["state"], "waiting")
    sent_s, begun_ms = job.get("sent"), job.get("begun_ms")
    return ListedJob(
        id=job["id"],
        state=state,
        model=job["model"],
        priority=priority_of(job["list"]),
        tenant=job["tenant"],
        owner=job["owner"],
        worker=job["worker"] if state == "running" else "",
        attempts=job["attempts"],
        age_s=None if sent_s is None else max(0.0, now_ms / 1e3 - sent_s),
        runs_s=None if begun_ms is None else max(0.0, (now_ms - begun_ms) / 1e3),
        tokens=job.get("tokens"),
        place=found and found.place,
        starts_in_s=found and found.starts_in_s,
    )
