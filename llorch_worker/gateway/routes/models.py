"""``/v1/models``: the models that were ever served at this Redis. ``/models/load`` and ``unload``:
what workers keep, by hand, as llama.cpp's router has them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from llorch_worker.broker.figures.fleet_client import FleetClient
from llorch_worker.broker.fleet.registry import ModelCard, WorkerCard, count_serving
from llorch_worker.contract import ModelNotServed
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.generation_config import GenerationConfig
from llorch_worker.gateway.bodies import Router
from llorch_worker.gateway.console.routes import operator
from llorch_worker.gateway.errors import ERRORS, HttpError, speaks_anthropic
from llorch_worker.gateway.gateway import Gateway, TheGateway, known_caller
from llorch_worker.openai_api.shape import WholeBody

router = Router(tags=["models"], responses=ERRORS, dependencies=[Depends(known_caller)])


class Status(BaseModel):
    """As llama.cpp's router has it."""

    value: Literal["loaded", "loading", "unloaded"]
    """``unloaded``: no worker has it; those that serve it load it once jobs wait."""
    failed: bool
    """Whether a worker has it set aside, because it did not load."""


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
    tasks: tuple[str, ...]
    """The kinds of jobs that it does: ``llorch.generate``, ``llorch.embed`` and so on."""
    status: Status


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/models", response_model=ModelList, include_in_schema=False)
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


class Moved(WholeBody):
    """``worker``: its name; by default the one with least to do."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "llama-2-7b"}]})

    model: str = Field(min_length=1)
    worker: str | None = None


class Done(BaseModel):
    success: Literal[True] = True
    worker: str
    """Which one does it soon."""


# Plain functions, which FastAPI runs in threads: the worker's answer may take seconds.


@router.post("/models/load", dependencies=[Depends(operator)])
def load(body: Moved, gateway: TheGateway) -> Done:
    """Have a worker load one of its models now, as ``llorch load`` does. For operators' keys."""
    return _tell(gateway, body, loads=True)


@router.post("/models/unload", dependencies=[Depends(operator)])
def unload(body: Moved, gateway: TheGateway) -> Done:
    """Have a worker end the model's engine until jobs wait, as ``llorch unload`` does. For
    operators' keys."""
    return _tell(gateway, body, loads=False)


def _tell(gateway: Gateway, body: Moved, *, loads: bool) -> Done:
    gateway.check(body)
    with FleetClient(gateway.settings.redis_url) as fleet:
        try:
            act = fleet.load if loads else fleet.unload
            return Done(worker=act(body.model, body.worker))
        except CommandError as refused:
            raise HttpError(409, refused.code, refused.message) from None


async def _models(gateway: Gateway) -> list[Model]:
    workers = await gateway.client.workers()
    off = gateway.settings.generation_config == "none"
    cards = await gateway.client.models()
    return [_model(card, workers, {} if off else card.generation_config) for card in cards]


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


def _status(name: str, workers: Sequence[WorkerCard]) -> Status:
    failed = any(name in worker.set_aside for worker in workers)
    if any(worker.model == name and not worker.away for worker in workers):
        return Status(value="loaded", failed=failed)
    loading = any(name in worker.loading for worker in workers)
    return Status(value="loading" if loading else "unloaded", failed=failed)


def _model(card: ModelCard, workers: Sequence[WorkerCard], config: GenerationConfig) -> Model:
    created = int(card.last_seen) if card.created is None else card.created
    return Model(
        id=card.name,
        created=created,
        max_model_len=card.max_context,
        workers=count_serving(workers, card.name),
        generation_config=config,
        tasks=card.tasks,
        status=_status(card.name, workers),
    )
