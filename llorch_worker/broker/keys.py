"""Every Redis key and channel. The Lua scripts get these names from here: see ``scripts.py``."""

from __future__ import annotations

PREFIX = "llorch:"

MODELS = f"{PREFIX}models"
"""Hash: model name -> JSON of :class:`llorch_worker.broker.registry.ModelCard`. Never expires."""

LEASES = f"{PREFIX}leases"
"""Sorted set: job id -> when its lease ends, in ms by Redis' own clock."""


def cancel_channel(database: int) -> str:
    """Pub/sub channel; each message is the id of a job to cancel now. All databases of a Redis
    share their channels, so the name begins with the database, as Celery's do."""
    return f"/{database}.{PREFIX}cancel"


def turn(work: str) -> str:
    """Exists for a while after one worker of the fleet did this ``work``, so that no other does."""
    return f"{PREFIX}turn:{work}"


FOLLOW_UPS = f"{PREFIX}follow_ups"
"""Sorted set: id of an ended job after whose end Celery has more to do -> when a worker may take
this up, in ms by Redis' own clock. See :mod:`llorch_worker.worker.celery.follow_ups`."""

DEAD = f"{PREFIX}dead"
"""List of dead letters, newest first; see :mod:`llorch_worker.broker.dead_letters`."""

ENDED_JOBS = f"{PREFIX}ended"
"""List of the jobs that ended last, newest first; see :mod:`llorch_worker.broker.ended_jobs`."""

WEBHOOKS = f"{PREFIX}gateway:webhooks"
"""Sorted set: id of a webhook that is to be delivered -> when to try next, in ms by Redis' own
clock."""

BATCH_LEASES = f"{PREFIX}gateway:batch_leases"
"""Sorted set: id of a batch that has not ended -> when its gateway's lease ends, in ms by Redis'
own clock."""


def job(job_id: str) -> str:
    """Hash, the record of a job.

    From our client: ``sent``, the Unix time by Redis' clock at which it enqueued the job, and
    ``idempotency``, its key. Then ``state``: scheduled (it waits for its ETA), claimed, queued
    (again) or ended. From the first claim on: ``fence``, ``attempts``, ``worker``, ``lease_ms``,
    ``history``, ``first_claim_ms``, ``progress`` (1 if this attempt's tokens are journalled) and
    ``place``, the worker's in :func:`load`, or empty.
    Once it has lost a worker: ``deaths``, and since its last progress ``strikes``, ``alone`` and
    ``peers``, see ``lua/sweep.lua``. While no list has the message: ``message`` and ``list``.
    ``follow``: set if the message of a cancelled job is still in a list, to ``back`` if it had
    come back to it. ``buried``: 1 if its message
    is a dead letter. ``retried_by``: the call that retried that, at ``retried_ms``."""
    return f"{PREFIX}job:{job_id}"


def bell(queue: str) -> str:
    """List with at most one entry, a ring, which wakes one of the workers that wait for jobs in
    ``queue``. A ring holds no job. See :mod:`llorch_worker.broker.doorbell`."""
    return f"{PREFIX}bell:{queue}"


FULL_SUFFIX = ":full"


def full_bell(queue: str) -> str:
    """The bell of a high queue for workers without room. It rings together with :func:`bell`."""
    return bell(queue) + FULL_SUFFIX


def load(queue: str) -> str:
    """Sorted set: worker queue -> how many jobs that worker runs, of the workers of the shared
    ``queue`` that have room for more. See :mod:`llorch_worker.broker.placement`."""
    return f"{PREFIX}load:{queue}"


def watch(model: str) -> str:
    """Exists while a worker of the model watches its lists for producers that do not ring; see
    :mod:`llorch_worker.broker.watch`."""
    return f"{PREFIX}watch:{model}"


def tenants(tenants_list: str) -> str:
    """Hash: tenant -> its jobs that wait in this list and in its own; ``*``: those in all tenants'
    own; ``/<tenant>``: jobs that started in its turn; ``*turns``: since the plain list's last. No
    tenant's name has a star or a slash."""
    return f"{PREFIX}tenants:{tenants_list}"


def passed(model: str) -> str:
    """Hash of lists of ``model`` that wait behind more urgent ones -> since when claims have passed
    them, in ms by Redis' own clock. Also ``passes``, the claims that did so since one of them last
    had its turn, and ``turn``, how often that was."""
    return f"{PREFIX}passed:{model}"


def live(model: str) -> str:
    """Sorted set: worker queue -> when that worker of ``model`` was last seen, in ms by Redis' own
    clock. See :mod:`llorch_worker.broker.registry`."""
    return f"{PREFIX}live:{model}"


def worker(queue: str) -> str:
    """JSON of :class:`.registry.WorkerCard` of the worker with this queue, with
    a TTL of a few seconds."""
    return f"{PREFIX}worker:{queue}"


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
    """Key and pub/sub channel of Celery's Redis backend. All databases share the channel."""
    return f"celery-task-meta-{job_id}"


def key_jobs(name: str) -> str:
    """Sorted set: id of a job that the gateway's key ``name`` has in flight -> since when, in ms by
    Redis' own clock."""
    return f"{PREFIX}gateway:key:{name}:jobs"


def response(key_name: str, job_id: str) -> str:
    """JSON of :class:`llorch_worker.openai_api.responses.ResponseRecord`, made with the gateway's
    key ``key_name``, with a TTL of ``response_ttl_s``. What came of it is the job's result."""
    return f"{PREFIX}gateway:response:{key_name}:{job_id}"


def gateway_document(document_id: str) -> str:
    """Hash: ``document``, the JSON of a file's or a batch's record. A batch also has ``fence``, the
    token of its driver's lease; ``counts``, JSON of its lines so far; and ``cancelling_at``, the
    Unix time of a request to cancel it."""
    return f"{PREFIX}gateway:document:{document_id}"


def gateway_documents(kind: str, owner: str) -> str:
    """Sorted set: ids of the files or batches of the gateway's key ``owner`` -> Unix time. Ids of
    records that have expired are removed by the next list."""
    return f"{PREFIX}gateway:{kind}:{owner}"


def webhook(webhook_id: str) -> str:
    """Hash: ``url``, ``caller`` (the name of the gateway's key), ``kind``, ``since_ms``,
    ``attempts``, ``body`` once its event has happened, and ``reason``, why the last attempt
    failed."""
    return f"{PREFIX}gateway:webhook:{webhook_id}"


def dead_webhooks(name: str) -> str:
    """Sorted set: id of a webhook of the gateway's key ``name`` that was given up -> when, in ms by
    Redis' own clock."""
    return f"{PREFIX}gateway:key:{name}:dead_webhooks"


def token_questions(model: str) -> str:
    """List of questions about the tokens of ``model``, each JSON; any of its workers takes one.
    Expires soon after the last."""
    return f"{PREFIX}tokens:{model}:questions"


def token_answer(question_id: str) -> str:
    """List that the one answer is pushed to, as JSON. Expires soon."""
    return f"{PREFIX}tokens:answer:{question_id}"
