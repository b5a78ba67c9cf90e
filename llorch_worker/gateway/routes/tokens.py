"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict

from llorch_worker.contract.token_questions import DescribeTokenizer
from llorch_worker.gateway.answering import say_ignored
from llorch_worker.gateway.bodies import Router
from llorch_worker.gateway.errors import ERRORS
from llorch_worker.gateway.gateway import TheGateway, known_caller
from llorch_worker.openai_api.tokens import DetokenizeRequest, ModelName, TokenizeRequest

router = Router(tags=["tokens"], responses=ERRORS, dependencies=[Depends(known_caller)])


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """What a tokenizer_config.json says, by its names."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    model_max_length: int


@router.post("/tokenize", response_model=Tokenized)
async def tokenize(body: TokenizeRequest, request: Request, gateway: TheGateway) -> Response:
    """The ids that a job with this prompt or these messages would get."""
    gateway.check(body)
    question = await gateway.bodies.run_for(request, body.question)
    card = await gateway.client.model_card(body.model)
    answer = await gateway.ask(card, question)
    count = len(answer["tokens"])
    document = Tokenized.model_construct(count=count, max_model_len=card.max_context, **answer)
    # FastAPI's encoder would take a second for a million ids.
    written = await gateway.bodies.run_for(request, lambda: document.model_dump_json().encode())
    whole = Response(written, media_type="application/json")
    say_ignored(whole, body.unknown)
    return whole


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, gateway: TheGateway, whole: Response) -> Detokenized:
    """The text of ids, with the spellings of control tokens."""
    gateway.check(body)
    say_ignored(whole, body.unknown)
    card = await gateway.client.model_card(body.model)
    return Detokenized(**await gateway.ask(card, body.question()))


@router.get("/tokenizer_info")
async def tokenizer_info(
    gateway: TheGateway, model: Annotated[ModelName | None, Query()] = None
) -> TokenizerInfo:
    """The tokenizer's kind, its special tokens and the chat template."""
    card = await gateway.client.model_card(model)
    answer = await gateway.ask(card, DescribeTokenizer())
    return TokenizerInfo(model_max_length=card.max_context, **answer)
