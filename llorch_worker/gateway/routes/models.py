"""``/v1/models``: the models that were ever served at this Redis."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from llorch_worker.broker.registry import ModelCard
from llorch_worker.contract import ModelNotServed
from llorch_worker.gateway.errors import ERRORS
from llorch_worker.gateway.gateway import TheGateway, known_caller

router = APIRouter(tags=["models"], responses=ERRORS, dependencies=[Depends(known_caller)])


class Model(BaseModel):
    """OpenAI's fields, then ours; ``max_model_len`` is vLLM's name of the context's length."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "llorch"
    max_model_len: int
    workers: int
    """The workers that serve it now."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models")
async def list_models(gateway: TheGateway) -> ModelList:
    """Every model that was ever served here, by name."""
    alive = [card.model for card in await gateway.client.workers()]
    cards = await gateway.client.models()
    return ModelList(data=[_model(card, alive.count(card.name)) for card in cards])


@router.get("/v1/models/{model}")
async def get_model(model: str, gateway: TheGateway) -> Model:
    for each in (await list_models(gateway)).data:
        if each.id == model:
            return each
    raise ModelNotServed("no worker here has ever served this model")


def _model(card: ModelCard, workers: int) -> Model:
    return Model(
        id=card.name, created=int(card.last_seen), max_model_len=card.max_context, workers=workers
    )
