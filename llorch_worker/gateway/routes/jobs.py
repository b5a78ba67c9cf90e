"""``/v1/jobs``: jobs that outlive their client's connection."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator
from typing import Annotated

from celery.utils import uuid
from fastapi import Depends, Header, Query, Response

from llorch_worker.client import AsyncJob, BrokerUnavailable
from llorch_worker.client.stream import Position
from llorch_worker.contract import (
    Event,
    Failed,
    InvalidRequest,
    JobLost,
    LlorchError,
    describe,
    encode_event,
)
from llorch_worker.gateway.answering import IdempotencyKey
from llorch_worker.gateway.bodies import Router, about_bytes
from llorch_worker.gateway.errors import ERRORS, HttpError
from llorch_worker.gateway.event_source import EventSource, on_one_line
from llorch_worker.gateway.gateway import Gateway, TheCaller, TheGateway, known_caller
from llorch_worker.gateway.job_document import JobDocument, JobRequest, job_document

logger = logging.getLogger(__name__)

router = Router(tags=["jobs"], responses=ERRORS, dependencies=[Depends(known_caller)])

PATIENCE_S = 60.0
"""How long Redis may be away before open streams end. Their readers come back by themselves."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


@router.post("/v1/jobs", status_code=202, response_model=JobDocument)
async def submit_job(
    body: JobRequest,
    gateway: TheGateway,
    caller: TheCaller,
    stream: Annotated[bool, Query(description="Its events are read at once.")] = False,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Enqueue a job, which goes on whoever hangs up.

    Its id is the header Location too. A second request with the same idempotency key, given as
    header or as field, answers with the first one's job, and its callback_url is not used. With
    stream, its events come one for each token from the first on.
    """
    request = body.generation_request()
    if request.idempotency_key is None:
        request = request.model_copy(update={"idempotency_key": idempotency_key})
    job_id, url = uuid(), body.callback_url
    if url is not None:
        # First, so that a gateway that dies in between forgets no webhook of an enqueued job.
        await gateway.webhooks.expect(job_id, url, caller)
    try:
        job = await gateway.submit(request, caller, waits=False, job_id=job_id, stream=stream)
    except LlorchError:
        # After any other error the job may be enqueued all the same.
        if url is not None:
            await gateway.webhooks.forget(job_id)
        raise
    if url is not None:
        if job.id == job_id:
            gateway.webhooks.watch(job)
        else:
            await gateway.webhooks.forget(job_id)
    document = await _document(gateway, job.id)
    answer = await _answer(gateway, document, 202)
    answer.headers["Location"] = document.urls.job
    return answer


async def known_job(job_id: str, gateway: TheGateway, caller: TheCaller) -> AsyncJob:
    """The job of a path. Raises ``HttpError`` 404."""
    # Other ids could name other keys of Redis.
    job = await gateway.owned_job(caller, job_id) if _ID.fullmatch(job_id) else None
    if job is None:
        raise _no_such_job()
    return job


TheJob = Annotated[AsyncJob, Depends(known_job)]


@router.get("/v1/jobs/{job_id}", response_model=JobDocument)
async def get_job(job: TheJob, gateway: TheGateway) -> Response:
    """The status of a job and, once it has ended, its result or its error."""
    return await _answer(gateway, await _document(gateway, job.id))


@router.delete(
    "/v1/jobs/{job_id}",
    response_model=JobDocument,
    responses={202: {"model": JobDocument, "description": "It runs, and ends within a step."}},
)
async def cancel_job(job: TheJob, gateway: TheGateway) -> Response:
    """Cancel a job. One that waits has ended then: 200. One that runs ends soon: 202. One that has
    succeeded or failed cannot be cancelled any more: 409. A second cancel answers as the first."""
    document = await _document(gateway, job.id)
    if document.status not in ("succeeded", "failed", "cancelled"):
        await job.cancel()
        document = await _document(gateway, job.id)
    if document.status in ("succeeded", "failed"):
        raise HttpError(409, "ALREADY_ENDED", f"the job has {document.status} already")
    return await _answer(gateway, document, 200 if document.status == "cancelled" else 202)


@router.get(
    "/v1/jobs/{job_id}/events",
    status_code=200,
    response_class=EventSource,
    responses={
        200: {
            "description": "Server-sent events: `event` is the type, `data` the event as JSON, "
            "`id` what to send as Last-Event-ID to go on after it. The last event is finished, "
            "failed or cancelled.",
            "content": {"text/event-stream": {}},
        },
        204: {"description": "Last-Event-ID is that of the last event: do not come back."},
    },
)
async def job_events(
    job: TheJob,
    gateway: TheGateway,
    last_event_id: Annotated[str | None, Header()] = None,
    from_id: Annotated[str | None, Query(alias="last_event_id")] = None,
) -> Response:
    """The events of a job as they come, from the first or the one after Last-Event-ID on.

    A reader may come back to any gateway, after any death, and sees every token once. While Redis
    is away, the stream pauses.
    """
    position = _position(last_event_id or from_id)
    if position.ended:
        return Response(status_code=204)
    await _document(gateway, job.id)
    return EventSource(_events(job, position), ends_at_stop=True)


async def _events(job: AsyncJob, position: Position) -> AsyncGenerator[bytes]:
    try:
        async for _, event in job.stream(position, patience_s=PATIENCE_S):
            yield sent_event(event, position)
    except JobLost as lost:
        yield sent_event(Failed(error=lost.document()), position)
    except BrokerUnavailable as error:
        # Without a last event: the reader comes back with Last-Event-ID.
        logger.warning("a stream of job %s ends early: %s", job.id, error)


def sent_event(event: Event, position: Position) -> bytes:
    document = on_one_line(encode_event(event))
    return f"id: {position}\nevent: {event.type}\ndata: {document}\n\n".encode()


def _position(last_event_id: str | None) -> Position:
    if not last_event_id:
        return Position()
    try:
        return Position.parse(last_event_id)
    except ValueError:
        rule = "must be the id of an event of this job"
        got = describe(last_event_id)
        raise InvalidRequest.from_fault("Last-Event-ID", rule, got) from None


async def _document(gateway: Gateway, job_id: str) -> JobDocument:
    try:
        return await job_document(gateway.client, job_id)
    except LookupError:
        raise _no_such_job() from None


async def _answer(gateway: Gateway, document: JobDocument, status: int = 200) -> Response:
    written = await gateway.bodies.run(
        about_bytes(document.result, ids=True),
        lambda: document.model_dump_json(exclude_none=True).encode(),
    )
    return Response(written, status, media_type="application/json")


def _no_such_job() -> HttpError:
    return HttpError(404, "NOT_FOUND", "there is no such job, or its result has expired")
