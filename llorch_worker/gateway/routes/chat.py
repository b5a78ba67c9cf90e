"""``/v1/chat/completions``."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from llorch_worker.gateway.answering import IdempotencyKey, answer_body, answers
from llorch_worker.gateway.bodies import Router
from llorch_worker.gateway.gateway import TheCaller, TheGateway
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.chat_answer import ChatCompletion

router = Router(tags=["chat"])


@router.post("/v1/chat/completions", responses=answers(ChatCompletion))
async def create_chat_completion(
    body: ChatRequest,
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Answer a chat."""
    return await answer_body(request, gateway, caller, body.keyed(idempotency_key))
