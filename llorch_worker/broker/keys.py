"""Every Redis key and channel. The Lua scripts get these names from here: see ``scripts.py``."""

from __future__ import annotations

PREFIX = "llorch:"

MODELS = f"{PREFIX}models"
"""Hash: model name -> JSON of :class:`llorch_worker.broker.registry.ModelCard`. Never expires."""

WORKER_QUEUES = f"{PREFIX}own_queues"
"""Sorted set: worker queue -> when its worker was last seen, in ms by Redis' own clock."""

WORKERS = f"{PREFIX}workers"
"""Set of hostnames that may have a :func:`worker` key; an index."""

CANCEL_CHANNEL = f"{PREFIX}cancel"
"""Pub/sub channel; each message is the id of a job to cancel now."""

LEASES = f"{PREFIX}leases"
"""Sorted set: job id -> when its lease ends, in ms by Redis' own clock."""

DEAD = f"{PREFIX}dead"
"""List of dead letters, newest first; see :mod:`llorch_worker.broker.dead_letters`."""


def job(job_id: str) -> str:
    """Hash, the record of a job that has been claimed: ``state`` (claimed, queued, ended),
    ``fence``, ``attempts``, ``progress`` (1 if this attempt's tokens are journalled), ``worker``,
    ``history``, ``first_claim_ms``, ``company`` (1 if this attempt ran beside others that had lost
    a worker), ``spared`` (1 if an attempt was not counted for that), ``buried`` (1 if its message
    is a dead letter), ``retried_by`` (the call that retried it), and, until it ends, ``message``
    and ``list``."""
    return f"{PREFIX}job:{job_id}"


def worker(hostname: str) -> str:
    """JSON of :class:`llorch_worker.broker.registry.WorkerCard`, with a TTL of a few seconds."""
    return f"{PREFIX}workers:{hostname}"


def events(job_id: str) -> str:
    """Stream; each entry has the one field ``event``, a JSON document of the contract."""
    return f"{PREFIX}job:{job_id}:events"


def cancel(job_id: str) -> str:
    """The id of the call that requested a cancel of the claimed job; that call is sent again if
    its reply is lost. Expires with the results."""
    return f"{PREFIX}job:{job_id}:cancel"


def watchers(job_id: str) -> str:
    """Exists while a client reads the stream; readers renew it."""
    return f"{PREFIX}job:{job_id}:watchers"


def sent(job_id: str) -> str:
    """Unix time, by Redis' clock, at which our client enqueued the job. It distinguishes a queued
    job from an unknown one."""
    return f"{PREFIX}job:{job_id}:sent"


def idempotency(model: str, key: str) -> str:
    """The id of the first job that was sent for ``model`` with this idempotency key."""
    return f"{PREFIX}idempotency:{model}:{key}"


def result(job_id: str) -> str:
    """Key and pub/sub channel of Celery's Redis backend."""
    return f"celery-task-meta-{job_id}"
