"""``/v1/usage``: what a tenant used, which is a key; for operators, what all did."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from llorch_worker.broker.jobs import usage
from llorch_worker.broker.jobs.usage import UsageRow
from llorch_worker.gateway.console.routes import TheConsole
from llorch_worker.gateway.errors import ERRORS
from llorch_worker.gateway.gateway import TheCaller

router = APIRouter(tags=["usage"], responses=ERRORS)


class UsageList(BaseModel):
    object: Literal["list"] = "list"
    data: list[UsageRow]


@router.get("/v1/usage")
def list_usage(
    console: TheConsole,
    caller: TheCaller,
    since: Annotated[date | None, Query(description="The first UTC day.")] = None,
    until: Annotated[date | None, Query(description="The last one; by default today.")] = None,
    tenant: Annotated[str | None, Query(description="Only this key's; operators see all.")] = None,
) -> UsageList:
    """Jobs, tokens and worker time by day, tenant and model; by default of the last 30 days."""
    first, last = usage.days_of(since, until)
    whose = tenant if caller.operator else caller.name
    return UsageList(data=usage.read(console.redis, first, last, whose))
