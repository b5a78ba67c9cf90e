"""``/v1/models``: the models that were ever served at this Redis."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from llorch_worker.broker.fleet.registry import ModelCard
from llorch_worker.contract import ModelNotServed
from llorch_worker.contract.generation_config import GenerationConfig
from llorch_worker.gateway.errors import ERRORS, speaks_anthropic
from llorch_worker.gateway.gateway import Gateway, TheGateway, known_caller

router = APIRouter(tags=["models"], responses=ERRORS, dependencies=[Depends(known_caller)])


class Model(BaseModel):
    """OpenAI's fields, then ours; ``max_model_len`` is vLLM's name of the context's length."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When a worker first announced it."""
    owned_by: str = "llorch"
    max_model_len: int
    workers: int
    """The workers that serve it now."""
    generation_config: dict[str, int | float]
    """What requests get that do not name it: as the model's makers have set it."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models", response_model=ModelList)
async def list_models(gateway: TheGateway, request: Request) -> ModelList | JSONResponse:
    """Every model that was ever served here, by name."""
    models = await _models(gateway)
    if not speaks_anthropic(request.scope):
        return ModelList(data=models)
    ends = {"first_id": models[0].id, "last_id": models[-1].id} if models else {}
    return JSONResponse({"data": list(map(_for_anthropic, models)), "has_more": False, **ends})


@router.get("/v1/models/{model}", response_model=Model)
async def get_model(model: str, gateway: TheGateway, request: Request) -> Model | JSONResponse:
    """A model that was ever served here."""
    models = await _models(gateway)
    for each in models:
        if each.id == model:
            anthropic = speaks_anthropic(request.scope)
            return JSONResponse(_for_anthropic(each)) if anthropic else each
    raise ModelNotServed.never(model, (each.id for each in models))


async def _models(gateway: Gateway) -> list[Model]:
    alive = [model for card in await gateway.client.workers() for model in card.served]
    off = gateway.settings.generation_config == "none"
    cards = await gateway.client.models()
    return [
        _model(card, alive.count(card.name), {} if off else card.generation_config)
        for card in cards
    ]


def _for_anthropic(model: Model) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def _model(card: ModelCard, workers: int, config: GenerationConfig) -> Model:
    created = int(card.last_seen) if card.created is None else card.created
    return Model(
        id=card.name,
        created=created,
        max_model_len=card.max_context,
        workers=workers,
        generation_config=config,
    )
