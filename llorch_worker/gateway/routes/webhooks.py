"""``/v1/webhooks/dead``: webhooks that no receiver took."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from llorch_worker.gateway.errors import ERRORS, HttpError
from llorch_worker.gateway.gateway import TheCaller, TheGateway

router = APIRouter(tags=["webhooks"], responses=ERRORS)


class DeadWebhook(BaseModel):
    id: str
    url: str
    attempts: int
    reason: str | None
    """Why the last attempt failed."""
    since: datetime
    """When its event happened."""


class DeadWebhookList(BaseModel):
    object: Literal["list"] = "list"
    data: list[DeadWebhook]


@router.get("/v1/webhooks/dead")
async def list_dead_webhooks(
    gateway: TheGateway,
    caller: TheCaller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> DeadWebhookList:
    """The webhooks of this key's jobs that no receiver took, newest first."""
    return DeadWebhookList(
        data=[
            DeadWebhook(
                id=each.id,
                url=each.url,
                attempts=each.attempts,
                reason=each.reason,
                since=datetime.fromtimestamp(each.since_ms / 1e3, UTC),
            )
            for each in await gateway.webhooks.dead(caller, limit)
        ]
    )


@router.post("/v1/webhooks/dead/{webhook_id}/retry", status_code=202)
async def retry_dead_webhook(webhook_id: str, gateway: TheGateway, caller: TheCaller) -> Response:
    """Deliver one of them after all, as if it were new."""
    if not await gateway.webhooks.retry(webhook_id, caller):
        raise HttpError(404, "NOT_FOUND", "this key has no such dead webhook")
    return Response(status_code=202)
