"""The event that a webhook sends of a response in the background."""

from __future__ import annotations

from llorch_worker.client import AsyncJob
from llorch_worker.gateway.responses.progress import response_now
from llorch_worker.gateway.responses.store import NotKept, ResponseStore
from llorch_worker.openai_api.responses import Response

_UNDER_WAY = ("queued", "in_progress")


async def response_event(store: ResponseStore, job: AsyncJob) -> tuple[str, Response] | None:
    """None until the response has ended.

    Raises:
        LookupError: it is not known, or not any more.
    """
    record = await store.find(job.id)
    if record is None:
        raise LookupError(job.id)
    try:
        response = await response_now(record, job)
    except NotKept:
        raise LookupError(job.id) from None
    if response.status in _UNDER_WAY:
        # It is kept until its end has been sent.
        await store.keep(record)
        return None
    return f"response.{response.status}", response
