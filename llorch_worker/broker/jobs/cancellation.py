"""Cancelling a job, whether it waits, runs, or has ended."""

from __future__ import annotations

from typing import Any, Literal

from redis import Redis

from llorch_worker.broker import keys
from llorch_worker.broker.jobs.results import failure_document, revoked_document
from llorch_worker.broker.queues import inbox_of
from llorch_worker.broker.scripts import database, run_script
from llorch_worker.broker.waiting.enqueue import LONGEST_WAIT_S
from llorch_worker.contract import CancelledEvent, Event, Failed, LlorchError, encode_event
from llorch_worker.settings import Settings

MOST_AT_ONCE = 100
CancelOutcome = Literal["queued", "running", "ended", "unknown"]
"""The job's state at the cancel. ``queued``: it waited, or its worker had died; it has now ended.
``running``: its worker hears of it and stops within a step. ``ended``: nothing was left to cancel.
``unknown``: Redis has no trace of the job."""


def channel(client: Redis) -> str:
    """Where the workers of the client's database hear of cancels."""
    return keys.cancel_channel(database(client))


def cancel(
    client: Redis,
    job_id: str,
    settings: Settings,
    *,
    heard_by: str | None = None,
    only_waiting: bool = False,
) -> CancelOutcome:
    """Cancels a job; with ``only_waiting`` only one that no worker has. The script decides in one
    step whether a worker's claim came first.

    ``heard_by``: the model of a worker that heard of it from somebody who knows the job. So an id
    without a trace in Redis is that of a stock producer's job in an inbox. It ends too, and what
    lies there with it is moved.
    """
    return _end(
        client,
        job_id,
        revoked_document(job_id),
        CancelledEvent(),
        settings,
        heard_by=heard_by,
        publish_on="" if only_waiting else channel(client),
    )


def end_waiting(
    client: Redis, job_id: str, error: LlorchError, settings: Settings
) -> CancelOutcome:
    """Fails a job with ``error`` if it waits; one that runs goes on."""
    failed = Failed(error=error.document())
    return _end(client, job_id, failure_document(job_id, error), failed, settings)


def fail_all_waiting(
    client: Redis, model: str, error: LlorchError, settings: Settings
) -> list[str]:
    """Fails the first :data:`MOST_AT_ONCE` jobs that wait for a worker of ``model``; returns their
    ids. Raises ``RedisError``."""
    first: Any = client.zrange(keys.waiting(model), 0, MOST_AT_ONCE - 1)
    return [job_id for job_id in first if end_waiting(client, job_id, error, settings) == "queued"]


def _end(
    client: Redis,
    job_id: str,
    document: str,
    event: Event,
    settings: Settings,
    *,
    heard_by: str | None = None,
    publish_on: str = "",
) -> CancelOutcome:
    outcome: CancelOutcome = run_script(
        client,
        "cancel",
        [
            job_id,
            document,
            encode_event(event),
            settings.result_ttl_s,
            settings.stream_ttl_s,
            max(LONGEST_WAIT_S, settings.result_ttl_s),
            int(heard_by is not None),
            publish_on,
        ],
        [] if heard_by is None else inbox_of(heard_by),
    )
    return outcome
