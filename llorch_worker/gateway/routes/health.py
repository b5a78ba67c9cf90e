"""Whether the gateway lives, and whether it can answer. Nobody needs a key to ask."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from llorch_worker.gateway.errors import ERRORS
from llorch_worker.gateway.gateway import TheGateway
from llorch_worker.openai_api.errors import NoWorker

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: str = "ok"


class Ready(Health):
    workers: int


@router.get("/health", responses={405: ERRORS[405]})
async def health() -> Health:
    """The process lives."""
    return Health()


@router.get("/ready", responses={503: ERRORS[503], 405: ERRORS[405]})
async def ready(gateway: TheGateway) -> Ready:
    """Redis answers and at least one worker is there."""
    workers = await gateway.client.workers()
    if not workers:
        raise NoWorker("no worker is there; start one with `llorch worker`")
    return Ready(workers=len(workers))
