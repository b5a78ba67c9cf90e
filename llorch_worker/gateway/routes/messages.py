"""Anthropic's ``/v1/messages``."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response
from typing_extensions import TypedDict

from llorch_worker.anthropic_api.answer import Message
from llorch_worker.anthropic_api.messages import CountTokensRequest, MessagesRequest
from llorch_worker.gateway.answering import TheSender, answer_body, answers, say_ignored
from llorch_worker.gateway.bodies import Router
from llorch_worker.gateway.errors import ERRORS
from llorch_worker.gateway.gateway import TheCaller, TheGateway

router = Router(tags=["messages"])


class InputTokens(TypedDict):
    input_tokens: int


class AnthropicError(TypedDict):
    type: str
    error: dict[str, Any]


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**each, "model": AnthropicError} for status, each in ERRORS.items()
}


@router.post("/v1/messages", responses=answers(Message) | _ERRORS)
async def create_message(body: MessagesRequest, sender: TheSender) -> Response:
    """Answer a chat in Anthropic's shape."""
    return await answer_body(sender, body)


@router.post("/v1/messages/count_tokens", responses=_ERRORS)
async def count_tokens(
    body: CountTokensRequest,
    request: Request,
    gateway: TheGateway,
    _: TheCaller,
    answer: Response,
) -> InputTokens:
    """The length of the prompt that a message would get."""
    gateway.check(body)
    say_ignored(answer, body.ignored)
    question = await gateway.bodies.run_for(request, body.question)
    card = await gateway.client.model_card(body.model)
    return {"input_tokens": len((await gateway.ask(card, question))["tokens"])}
