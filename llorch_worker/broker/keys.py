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

FOLLOW_UPS = f"{PREFIX}follow_ups"
"""Sorted set: id of an ended job after whose end Celery has more to do -> when a worker may take
this up, in ms by Redis' own clock. See :mod:`llorch_worker.worker.celery.follow_ups`."""

DEAD = f"{PREFIX}dead"
"""List of dead letters, newest first; see :mod:`llorch_worker.broker.dead_letters`."""


def job(job_id: str) -> str:
    """Hash, the record of a job.

    From our client: ``sent``, the Unix time by Redis' clock at which it enqueued the job, and
    ``idempotency``, its key. Then ``state``: scheduled (it waits for its ETA), claimed, queued
    (again) or ended. From the first claim on: ``fence``, ``attempts``, ``worker``, ``lease_ms``,
    ``history``, ``first_claim_ms`` and ``progress`` (1 if this attempt's tokens are journalled).
    Once it has lost a worker: ``deaths``, and since its last progress ``strikes``, ``alone`` and
    ``peers``, see ``lua/sweep.lua``. While no list has the message: ``message`` and ``list``.
    ``follow``: 1 if the message of a cancelled job is still in a list. ``buried``: 1 if its message
    is a dead letter. ``retried_by``: the call that retried that."""
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


def idempotency(model: str, key: str) -> str:
    """The id of the first job that was sent for ``model`` with this idempotency key."""
    return f"{PREFIX}idempotency:{model}:{key}"


def result(job_id: str) -> str:
    """Key and pub/sub channel of Celery's Redis backend."""
    return f"celery-task-meta-{job_id}"


def key_jobs(name: str) -> str:
    """Sorted set: id of a job that the gateway's key ``name`` has in flight -> Unix time."""
    return f"{PREFIX}gateway:key:{name}:jobs"


def token_questions(model: str) -> str:
    """List of questions about the tokens of ``model``, each JSON; any of its workers takes one.
    Expires soon after the last."""
    return f"{PREFIX}tokens:{model}:questions"


def token_answer(question_id: str) -> str:
    """List that the one answer is pushed to, as JSON. Expires soon."""
    return f"{PREFIX}tokens:answer:{question_id}"
