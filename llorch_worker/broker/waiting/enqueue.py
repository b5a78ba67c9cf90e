"""Putting a job into its queue: limit, idempotency key, time and message in one step."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from celery import Celery
from redis import Redis
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import is_out_of_memory
from llorch_worker.broker.fleet.registry import ModelCard
from llorch_worker.broker.messages.message import OWNER, write_message
from llorch_worker.broker.queues import inbox_of, route
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import (
    TEXT_TASKS,
    GenerationRequest,
    IdempotencyKeyReused,
    JobRequest,
    QueueFull,
    request_digest,
)

LONGEST_WAIT_S = 30 * 24 * 3600
"""How long the idempotency key of a job that is never claimed is kept, and the cancel of one whose
message may still come."""


STAGED_S = 60
"""How long Redis keeps the message of a client that dies before it enqueues the job."""
_UNSET_TIME = "0000000000.000000"
"""Where ``lua/enqueue.lua`` writes the time in a staged message."""

BYTES_A_TOKEN = 4
MOST_EXPECTED_TOKENS = 4096
"""Of an answer: few are as long as they may be."""


def enqueue(
    client: Redis,
    app: Celery,
    request: JobRequest,
    *,
    model: ModelCard,
    job_id: str,
    places: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    owner: str = "",
    awaited_s: int = 0,
    digest: str | None = None,
) -> str:
    """Enqueues a job and returns ``job_id``, or the id of the first job with the request's
    idempotency key.

    ``places``: where it might be placed, the best first, see
    :mod:`..fleet.affinity`. ``headers`` go beside the message's own. ``owner``: the
    gateway's key that sends the job. ``awaited_s``: for how long a client counts as reading its
    stream before it does. ``digest``: what requests with the same key must share; by
    default that of this request.

    Raises:
        IdempotencyKeyReused: the first job with the key was sent with another request.
        QueueFull: the limit of waiting jobs is reached, or Redis has no memory for another.
            Nothing is left behind.
    """
    to = route(model.name, request.priority)
    headers = dict(headers or {}) | ({OWNER: owner} if owner else {})
    before, after = write_message(
        app, request, model=model.name, job_id=job_id, to=to, headers=headers
    )
    message_bytes = len(before) + len(after)
    key = request.idempotency_key
    asked = [
        to.list_key,
        model.queue_limit,
        LONGEST_WAIT_S,
        "" if key is None else keys.idempotency(model.name, key),
        digest or request_digest([request]),
        request.tenant or "",
        _expected_tokens(request, message_bytes),
        "" if request.deadline_s is None else round(request.deadline_s * 1e3),
        owner,
        awaited_s,
        _least_context(request),
        int(request.task in TEXT_TASKS) or "",
        *places,
    ]
    inbox = inbox_of(model.name) if model.queue_limit else []
    # Not the job's id: another call may have it, such as that of a batch's next driver.
    call = secrets.token_hex(8)
    staged = keys.staged(call) if message_bytes > keys.APART_BYTES else None
    try:
        outcome, value = "lost", ""
        if staged:
            client.set(staged, f"{before}{_UNSET_TIME}{after}", ex=STAGED_S)
            outcome, value = run_script(
                client, "enqueue", [job_id, call, len(before), *asked], inbox
            )
        if outcome == "lost":
            outcome, value = run_script(client, "enqueue", [job_id, before, after, *asked], inbox)
    except RedisError as error:
        if not is_out_of_memory(error):
            raise
        if staged:
            client.delete(staged)
        raise QueueFull(
            "Redis is at its maxmemory and accepts no more jobs; "
            "submit again when jobs have ended, or raise maxmemory"
        ) from error
    if staged and outcome != "sent":
        client.delete(staged)
    if outcome == "other":
        raise IdempotencyKeyReused.by(value)
    if outcome == "full":
        raise QueueFull(
            f"{value} jobs for {model.name!r} wait; the limit is {model.queue_limit}; "
            "submit again later, start more workers, or raise their LLORCH_QUEUE_LIMIT"
        )
    return str(value)


def _expected_tokens(request: JobRequest, message_bytes: int) -> int:
    """What the job is expected to take of a worker, in tokens, for its tenant's share."""
    if not isinstance(request, GenerationRequest):
        return message_bytes // BYTES_A_TOKEN
    most = request.most_tokens
    answer = MOST_EXPECTED_TOKENS if most is None else min(most, MOST_EXPECTED_TOKENS)
    return message_bytes // BYTES_A_TOKEN + answer * request.n


def _least_context(request: JobRequest) -> int | str:
    """The context that the job needs, as far as it is known without the model's tokenizer. A text
    that is too long for a model of vectors is refused by any worker, or cut."""
    if not isinstance(request, GenerationRequest):
        return ""
    ids = request.prompt_token_ids
    return "" if ids is None else len(ids) + request.least_tokens
