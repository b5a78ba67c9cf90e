"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

from fastapi.responses import Response

from llorch_worker.gateway.answering import TheSender, answer_body, answers
from llorch_worker.gateway.bodies import Router
from llorch_worker.openai_api.chat import ChatRequest
from llorch_worker.openai_api.chat_answer import ChatCompletion
from llorch_worker.openai_api.completion_answer import Completion
from llorch_worker.openai_api.completions import CompletionRequest

router = Router()


@router.post("/v1/completions", tags=["completions"], responses=answers(Completion))
async def create_completion(body: CompletionRequest, sender: TheSender) -> Response:
    """Complete prompts, each as a job of its own."""
    return await answer_body(sender, body)


@router.post("/v1/chat/completions", tags=["chat"], responses=answers(ChatCompletion))
async def create_chat_completion(body: ChatRequest, sender: TheSender) -> Response:
    """Answer a chat."""
    return await answer_body(sender, body)
