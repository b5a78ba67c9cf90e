"""Putting a job into its queue: limit, idempotency key, time and message in one step."""

from __future__ import annotations

from redis import Redis
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.connection import is_out_of_memory
from llorch_worker.broker.message import JobMessages
from llorch_worker.broker.queues import list_of, route, worker_queue
from llorch_worker.broker.registry import ModelCard
from llorch_worker.broker.scripts import run_script
from llorch_worker.broker.waiting import lists_of
from llorch_worker.broker.worker_queues import lists_of_worker
from llorch_worker.contract import GenerationRequest, QueueFull


def enqueue(
    client: Redis,
    messages: JobMessages,
    request: GenerationRequest,
    *,
    model: ModelCard,
    job_id: str,
    ttl_s: int,
    worker: str | None = None,
) -> str:
    """The id of the job in the queue: ``job_id``, or that of the first job with the request's
    idempotency key.

    ``ttl_s``: how long that key is remembered. ``worker``: the node name of the one that is to take
    it; its own queue counts against the limit then.

    Raises:
        QueueFull: as many jobs of this model wait as may, or Redis has no memory for another.
            Nothing is left behind.
    """
    to = route(model.name, request.priority, worker)
    own = [] if worker is None else lists_of_worker(worker_queue(model.name, worker))
    before, after = messages.write(request, model=model.name, job_id=job_id, to=to)
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
                ttl_s,
                "" if key is None else keys.idempotency(model.name, key),
            ],
            [list_of(to), *lists_of(model.name), *own],
        )
    except RedisError as error:
        if not is_out_of_memory(error):
            raise
        raise QueueFull(
            "Redis is at its maxmemory and takes no more jobs; "
            "submit again when jobs have ended, or raise maxmemory"
        ) from error
    if outcome == "full":
        raise QueueFull(
            f"{value} jobs for {model.name!r} wait, and no more than {model.queue_limit} may; "
            "submit again later, start more workers, or raise their LLORCH_QUEUE_LIMIT"
        )
    return str(value)
