"""A job as clients send it and see it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from llorch_worker.broker.waiting.waiting import Position
from llorch_worker.client import AsyncClient, JobState
from llorch_worker.contract import (
    Cancelled,
    ErrorDocument,
    GenerationRequest,
)
from llorch_worker.contract.kinds import AnyResult
from llorch_worker.openai_api.shape import CallbackUrl

_EVENT_TYPES = {
    "succeeded": "job.completed",
    "failed": "job.failed",
    "cancelled": "job.cancelled",
}


class JobRequest(GenerationRequest):
    """The fields of ``llorch.generate``, and where to send the end."""

    model_config = ConfigDict(
        title="JobRequest",
        json_schema_extra={"examples": [{"prompt": "Once upon a time", "max_tokens": 32}]},
    )

    callback_url: CallbackUrl | None = None
    """An http or https URL. The gateways post the job's document there once it has ended."""

    def generation_request(self) -> GenerationRequest:
        """What workers get."""
        fields = {name: getattr(self, name) for name in GenerationRequest.model_fields}
        given = self.model_fields_set - {"callback_url"}
        return GenerationRequest.model_construct(_fields_set=given, **fields)


class JobUrls(BaseModel):
    """Relative to the gateway."""

    job: str
    events: str


class JobDocument(BaseModel):
    """A job: its status and, once it has ended, its result or its error."""

    id: str
    object: Literal["job"] = "job"
    status: JobState
    worker: str | None = None
    position: Position | None = None
    """Of a job that waits, if it is known."""
    result: AnyResult | None = None
    error: ErrorDocument | None = None
    urls: JobUrls


async def job_document(client: AsyncClient, job_id: str) -> JobDocument:
    """Raises ``LookupError`` if Redis does not know the job, or not any more."""
    status = await client.job(job_id).status()
    if status.state == "unknown":
        raise LookupError(job_id)
    cancelled = status.state == "cancelled"
    return JobDocument(
        id=status.id,
        status=status.state,
        worker=status.worker,
        position=status.position,
        result=status.result,
        error=Cancelled("the job was cancelled").document() if cancelled else status.error,
        urls=JobUrls(job=f"/v1/jobs/{status.id}", events=f"/v1/jobs/{status.id}/events"),
    )


async def job_event(client: AsyncClient, job_id: str) -> tuple[str, JobDocument] | None:
    """A webhook's event of a job; None until it has ended. Raises like :func:`job_document`."""
    document = await job_document(client, job_id)
    type = _EVENT_TYPES.get(document.status)
    return None if type is None else (type, document)
