"""``/v1/responses``: answers that are kept, conversations that go on, and jobs to come back for."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request, WebSocket
from fastapi import Response as PlainResponse
from pydantic import BaseModel

from llorch_worker.contract import Finished, InvalidRequest
from llorch_worker.gateway.answering import TheSender, say_generation_config, say_ignored
from llorch_worker.gateway.bodies import Router
from llorch_worker.gateway.documents import Order, Page
from llorch_worker.gateway.errors import ERRORS, HttpError
from llorch_worker.gateway.event_source import EventSource
from llorch_worker.gateway.gateway import TheCaller, TheGateway
from llorch_worker.gateway.job_events import PATIENCE_S
from llorch_worker.gateway.responding import Creation, written
from llorch_worker.gateway.response_socket import ResponseSocket
from llorch_worker.gateway.responses.event_json import sse
from llorch_worker.gateway.responses.progress import end_of, response_events, response_now
from llorch_worker.gateway.responses.store import ResponseStore
from llorch_worker.openai_api.responses import InputTokens, Response
from llorch_worker.openai_api.responses_compaction import Compacted, summarising
from llorch_worker.openai_api.responses_items import Item
from llorch_worker.openai_api.responses_request import ResponseRequest

router = Router(tags=["responses"], responses=ERRORS)

CANCEL_WAIT_S = 5.0
"""How long a cancel waits for the end of a running job, which comes within an engine step unless
its worker has died."""


async def _store(gateway: TheGateway, caller: TheCaller) -> ResponseStore:
    return gateway.responses(caller)


TheStore = Annotated[ResponseStore, Depends(_store)]

_OR_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The response; with stream, its events as server-sent events.",
        "content": {"text/event-stream": {}},
    }
}


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Page[Item]):
    pass


@router.post("/v1/responses", response_model=Response, responses=_OR_EVENTS)
async def create(body: ResponseRequest, sender: TheSender) -> PlainResponse:
    """The next turn of a conversation. With background, come back for it."""
    size_bytes = len(await sender.request.body())
    keyed = body.keyed(sender.idempotency_key)
    creation = Creation(sender.gateway, sender.caller, keyed, size_bytes)
    answer = await creation.respond(sender.request)
    say_ignored(answer, body.ignored)
    say_generation_config(answer, creation.jobs)
    return answer


@router.websocket("/v1/responses")
async def connect(socket: WebSocket) -> None:
    """Responses one after another, each for a message ``response.create``."""
    state = socket.app.state
    await ResponseSocket(socket, state.gateway, state.metrics).serve()


@router.post("/v1/responses/input_tokens")
async def input_tokens(
    body: ResponseRequest,
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    head: PlainResponse,
) -> InputTokens:
    """The length of the prompt that a response to this would get."""
    say_ignored(head, body.ignored)
    return await Creation(gateway, caller, body, len(await request.body())).count()


@router.post("/v1/responses/compact")
async def compact(
    body: ResponseRequest,
    request: Request,
    gateway: TheGateway,
    caller: TheCaller,
    head: PlainResponse,
) -> Compacted:
    """Items to send in place of a conversation: the user's messages, and the model's summary of
    all of it."""
    say_ignored(head, body.ignored)
    size_bytes = len(await request.body())
    return await Creation(gateway, caller, summarising(body), size_bytes).compact(request)


@router.get("/v1/responses/{response_id}", response_model=Response, responses=_OR_EVENTS)
async def retrieve(
    response_id: str,
    gateway: TheGateway,
    store: TheStore,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> PlainResponse:
    """What has come of it by now; with stream, its events from the first on, or from the one after
    the number ``starting_after``."""
    record = await store.get(response_id)
    job = gateway.client.job(record.job_id, known=True)
    now = await response_now(record, job, gateway.bodies)
    if not now.ended:
        # Its conversation may be wanted for as long after its end.
        await store.keep(record)
    if not stream:
        return await written(gateway, now)
    entries = job.stream(patience_s=PATIENCE_S)
    first = [await anext(entries)] if now.ended else []
    if starting_after is not None and first and isinstance(first[0].event, Finished):
        # It was made from the result, in which texts are not in the pieces that were numbered.
        message = "its events are no longer kept; retrieve it without stream"
        raise HttpError(409, "EVENTS_NOT_KEPT", message, param="starting_after")
    after = -1 if starting_after is None else starting_after
    events = response_events(record, job, entries, gateway.bodies, first, after=after)
    return EventSource(await sse(event, gateway.bodies) async for event in events)


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, gateway: TheGateway, store: TheStore) -> DeletedResponse:
    """Deletes it and its text, also that of its job and webhook. One that is not finished is
    cancelled."""
    record = await store.get(response_id)
    if record.response.background:
        await gateway.webhooks.forget(record.job_id)
    await gateway.forget(gateway.client.job(record.job_id, known=True))
    # Last: who sends a deletion again that failed half-way needs it.
    await store.delete(record)
    return DeletedResponse(id=response_id)


@router.post("/v1/responses/{response_id}/cancel", response_model=Response)
async def cancel(response_id: str, gateway: TheGateway, store: TheStore) -> PlainResponse:
    """Cancels a response in the background; one that has ended stays as it is."""
    record = await store.get(response_id)
    if not record.response.background:
        message = "only a response in the background can be cancelled; hang up on others"
        raise HttpError(400, "INVALID_REQUEST", message, param="response_id")
    job = gateway.client.job(record.job_id, known=True)
    now = await response_now(record, job, gateway.bodies)
    if not now.ended:
        await job.cancel()
        with suppress(TimeoutError):
            await end_of(job, CANCEL_WAIT_S)
        now = await response_now(record, job, gateway.bodies)
    return await written(gateway, now)


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList)
async def input_items(
    response_id: str,
    store: TheStore,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Order = "desc",
) -> PlainResponse:
    """The turns that it answers, those of earlier responses too."""
    record, size_bytes = await store.get_sized(response_id)
    items = record.conversation if order == "asc" else record.conversation[::-1]
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        rule = "must be the id of an item of this response"
        raise InvalidRequest.from_fault("after", rule, "another")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    answer = ItemList.of(page, more=begin + limit < len(items))
    body = await store.bodies.run(size_bytes, lambda: answer.model_dump_json(by_alias=True))
    return PlainResponse(body, media_type="application/json")
