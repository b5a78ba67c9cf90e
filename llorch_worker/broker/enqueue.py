"""Putting a job into its queue: limit, idempotency key, time and message in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from celery import Celery
from redis import Redis
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.connection import is_out_of_memory
from llorch_worker.broker.message import OWNER, write_message
from llorch_worker.broker.queues import (
    route,
    shared_lists,
    tenants_list,
    worker_lists,
    worker_queue,
)
from llorch_worker.broker.registry import ModelCard
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import (
    GenerationRequest,
    IdempotencyKeyReused,
    QueueFull,
    request_digest,
)

LONGEST_WAIT_S = 30 * 24 * 3600
"""How long a job that waits is known by its id, its idempotency key and a cancel. A message can
vanish from its list, by ``celery purge`` for example, so its traces must not stay for ever."""


def enqueue(
    client: Redis,
    app: Celery,
    request: GenerationRequest,
    *,
    model: ModelCard,
    job_id: str,
    worker: str | None = None,
    places: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    owner: str = "",
    awaited_s: int = 0,
    digest: str | None = None,
) -> str:
    """Enqueues a job and returns ``job_id``, or the id of the first job with the request's
    idempotency key.

    ``worker``: the node name of the worker that should take the job. Jobs in its worker queue then
    count against the limit too. ``places``: where it might be placed instead, the best first, see
    :mod:`.placement`. ``headers`` go beside the message's own. ``owner``: the
    gateway's key that sends the job. ``awaited_s``: for how long a client counts as reading its
    stream before it does. ``digest``: what requests with the same key must share; by
    default that of this request.

    Raises:
        IdempotencyKeyReused: the first job with the key was sent with another request.
        QueueFull: the limit of waiting jobs is reached, or Redis has no memory for another.
            Nothing is left behind.
    """
    to = route(model.name, request.priority, worker)
    counted: list[str] = []
    if model.queue_limit:
        counted = shared_lists(model.name)
        counted += [] if worker is None else worker_lists(worker_queue(model.name, worker))
    headers = dict(headers or {}) | ({OWNER: owner} if owner else {})
    before, after = write_message(
        app, request, model=model.name, job_id=job_id, to=to, headers=headers
    )
    # In a worker queue all jobs wait in one line.
    tenant = request.tenant if worker is None and request.tenant is not None else ""
    pushed_to = tenants_list(to.list_key) if tenant else to.list_key
    key = request.idempotency_key
    try:
        outcome, value = run_script(
            client,
            "enqueue",
            [
                job_id,
                before,
                after,
                model.queue_limit,
                LONGEST_WAIT_S,
                "" if key is None else keys.idempotency(model.name, key),
                digest or request_digest([request]),
                tenant,
                "" if request.deadline_s is None else round(request.deadline_s * 1e3),
                owner,
                awaited_s,
                *places,
            ],
            [pushed_to, *counted],
        )
    except RedisError as error:
        if not is_out_of_memory(error):
            raise
        raise QueueFull(
            "Redis is at its maxmemory and accepts no more jobs; "
            "submit again when jobs have ended, or raise maxmemory"
        ) from error
    if outcome == "other":
        raise IdempotencyKeyReused.by(value)
    if outcome == "full":
        raise QueueFull(
            f"{value} jobs for {model.name!r} wait; the limit is {model.queue_limit}; "
            "submit again later, start more workers, or raise their LLORCH_QUEUE_LIMIT"
        )
    return str(value)
