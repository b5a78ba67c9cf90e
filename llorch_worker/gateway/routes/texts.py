"""``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``."""

from __future__ import annotations

import time

from fastapi.responses import Response

from llorch_worker.client import AsyncJob
from llorch_worker.contract import TextsResult
from llorch_worker.gateway.answering import Sender, TheSender, say_ignored
from llorch_worker.gateway.bodies import Router, about_bytes
from llorch_worker.gateway.errors import ERRORS
from llorch_worker.gateway.job_events import PATIENCE_S, OwnClock
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
async def create_embeddings(body: EmbeddingsBody, sender: TheSender) -> Response:
    """The vectors of texts, as one job."""
    return await _answer(sender, body)


@router.post("/v1/rerank", response_model=Ranking)
async def rerank(body: RerankBody, sender: TheSender) -> Response:
    """How well documents answer a query, the best first."""
    return await _answer(sender, body)


@router.post("/v1/score", response_model=Scores)
async def score(body: ScoreBody, sender: TheSender) -> Response:
    """How well texts go together, pair by pair."""
    return await _answer(sender, body)


async def _answer(sender: Sender, body: TextsBody) -> Response:
    body, bodies = sender.checked(body), sender.gateway.bodies
    requests = await bodies.run_for(sender.request, body.to_requests)
    comes_back = body.idempotency_key is not None
    waiting = Waiting(sender.gateway, sender.caller, comes_back=comes_back)
    clock = OwnClock(requests)
    job = await waiting.submit(requests[0])
    result = await waiting.answer(sender.request, _result(job, clock))
    created = int(time.time())
    written = await bodies.run(
        about_bytes(result),
        lambda: body.answer([result], created).model_dump_json(exclude_none=True).encode(),
    )
    whole = Response(written, media_type="application/json")
    say_ignored(whole, body.unknown)
    return whole


async def _result(job: AsyncJob[TextsResult], clock: OwnClock) -> TextsResult:
    async with clock.limiting():
        return await job.result(patience_s=PATIENCE_S)
