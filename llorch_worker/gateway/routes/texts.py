"""``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``."""

from __future__ import annotations

import time

from fastapi import Request
from fastapi.responses import Response

from llorch_worker.client import AsyncJob
from llorch_worker.contract import TextsResult
from llorch_worker.gateway.answering import IdempotencyKey, say_ignored
from llorch_worker.gateway.bodies import Router, about_bytes
from llorch_worker.gateway.errors import ERRORS
from llorch_worker.gateway.gateway import Gateway, TheCaller, TheGateway
from llorch_worker.gateway.job_events import PATIENCE_S, OwnClock
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.waiting import Waiting
from llorch_worker.openai_api.texts import (
    Embeddings,
    EmbeddingsBody,
    Ranking,
    RerankBody,
    ScoreBody,
    Scores,
    TextsBody,
)

router = Router(tags=["texts"], responses=ERRORS)


@router.post("/v1/embeddings", response_model=Embeddings)
async def create_embeddings(
    body: EmbeddingsBody,
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """The vectors of texts, as one job."""
    return await _answer(request, gateway, caller, body.keyed(idempotency_key))


@router.post("/v1/rerank", response_model=Ranking)
async def rerank(
    body: RerankBody,
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """How well documents answer a query, the best first."""
    return await _answer(request, gateway, caller, body.keyed(idempotency_key))


@router.post("/v1/score", response_model=Scores)
async def score(
    body: ScoreBody,
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """How well texts go together, pair by pair."""
    return await _answer(request, gateway, caller, body.keyed(idempotency_key))


async def _answer(request: Request, gateway: Gateway, caller: Caller, body: TextsBody) -> Response:
    gateway.check(body)
    requests = await gateway.bodies.run_for(request, body.to_requests)
    waiting = Waiting(gateway, caller, comes_back=body.idempotency_key is not None)
    clock = OwnClock(requests)
    job = await waiting.submit(requests[0])
    result = await waiting.answer(request, _result(job, clock))
    created = int(time.time())
    written = await gateway.bodies.run(
        about_bytes(result),
        lambda: body.answer([result], created).model_dump_json(exclude_none=True).encode(),
    )
    whole = Response(written, media_type="application/json")
    say_ignored(whole, body.unknown)
    return whole


async def _result(job: AsyncJob[TextsResult], clock: OwnClock) -> TextsResult:
    async with clock.limiting():
        return await job.result(patience_s=PATIENCE_S)
