"""What a webhook tells of a response in the background."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from llorch_worker.client import AsyncClient
from llorch_worker.gateway.job_document import job_document
from llorch_worker.openai_api.responses import PREFIX, status_of


class EndedResponse(BaseModel):
    """As OpenAI's webhooks have it: come back for the rest."""

    id: str
    object: Literal["response"] = "response"


async def response_event(client: AsyncClient, job_id: str) -> tuple[str, EndedResponse] | None:
    """None until the job has ended.

    Raises:
        LookupError: Redis does not know the job, or not any more.
    """
    job = await job_document(client, job_id)
    if job.status not in ("succeeded", "failed", "cancelled"):
        return None
    status = job.status if job.result is None else status_of(job.result)
    return f"response.{status}", EndedResponse(id=f"{PREFIX}{job_id}")
