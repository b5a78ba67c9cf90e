"""``/v1/batches``: files of requests, run on the workers' spare time."""

from __future__ import annotations

import re
import time
import uuid
from typing import Annotated, Literal

from fastapi import Query, Response
from pydantic import ConfigDict, Field

from llorch_worker.batches.endpoints import ENDPOINTS
from llorch_worker.client import BrokerUnavailable
from llorch_worker.contract import InvalidRequest, describe
from llorch_worker.gateway.answering import say_ignored
from llorch_worker.gateway.batches.record import Batch, BatchRecord, new_batch_id
from llorch_worker.gateway.bodies import Router
from llorch_worker.gateway.documents import Page
from llorch_worker.gateway.errors import ERRORS, HttpError
from llorch_worker.gateway.files.record import LEAST_KEPT_S, MOST_KEPT_S
from llorch_worker.gateway.gateway import TheCaller, TheGateway
from llorch_worker.openai_api.shape import CallbackUrl, Label, Metadata, Shape, WholeBody

router = Router(tags=["batches"], responses=ERRORS)

LONGEST_WINDOW_S = 7 * 24 * 3600
_WINDOW = re.compile(r"([1-9][0-9]{0,2})(h|d)")
_UNIT_S = {"h": 3600, "d": 24 * 3600}


class ExpiresAfter(Shape):
    """From when on the seconds count: the end of the batch, when its files are made."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_KEPT_S, le=MOST_KEPT_S)


class NewBatch(WholeBody):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "input_file_id": "file-<the id of an upload>",
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                }
            ]
        }
    )

    input_file_id: Label
    """A file with the purpose ``batch``: JSON lines of custom_id, method, url and body."""
    endpoint: str
    """The url of every line."""
    completion_window: str
    """From 1h to 7d. Lines that have not been run by then end as errors."""
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    """When its files are deleted. By default they go with it, LLORCH_GATEWAY_RESPONSE_TTL_S after
    its end."""
    callback_url: CallbackUrl | None = None
    """Ours: an http or https URL, where the batch is posted once it has ended."""


class BatchList(Page[Batch]):
    pass


@router.post("/v1/batches")
async def create_batch(
    gateway: TheGateway, caller: TheCaller, new: NewBatch, answer: Response
) -> Batch:
    """Runs the lines of a file, with low priority unless a line says otherwise."""
    gateway.check(new)
    say_ignored(answer, new.unknown)
    window_s = _window_s(new.completion_window)
    if new.endpoint not in ENDPOINTS:
        raise _refused("endpoint", f"must be {', '.join(ENDPOINTS)}", new.endpoint)
    try:
        file = await gateway.files.get(caller, new.input_file_id)
    except HttpError:
        raise _refused("input_file_id", "no such file", new.input_file_id) from None
    if file.purpose != "batch":
        raise _refused("input_file_id", "the file's purpose must be batch", file.purpose)
    now_s = time.time()
    batch = Batch(
        id=new_batch_id(),
        endpoint=new.endpoint,
        input_file_id=file.id,
        completion_window=new.completion_window,
        created_at=int(now_s),
        expires_at=int(now_s) + window_s,
        metadata=new.metadata,
    )
    record = BatchRecord(
        id=batch.id,
        owner=caller.name,
        created_at=batch.created_at,
        batch=batch,
        input_path=file.path,
        jobs_seed=uuid.uuid4(),
        output_keep_s=new.output_expires_after and new.output_expires_after.seconds,
    )
    if new.callback_url is not None:
        # First: a gateway that dies in between forgets no webhook of a batch.
        await gateway.webhooks.expect(batch.id, new.callback_url, caller, kind="batch")
    try:
        await gateway.batches.add(record, now_s)
    except BrokerUnavailable:
        await gateway.webhooks.forget(batch.id)
        raise
    return batch


@router.get("/v1/batches")
async def list_batches(
    gateway: TheGateway,
    caller: TheCaller,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """The batches of this key, the newest first."""
    records, more = await gateway.batches.page(caller.name, after=after, limit=limit)
    return BatchList.of([record.batch for record in records], more=more)


@router.get("/v1/batches/{batch_id}")
async def get_batch(batch_id: str, gateway: TheGateway, caller: TheCaller) -> Batch:
    """How far a batch has come."""
    return (await gateway.batches.get(caller, batch_id)).batch


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, gateway: TheGateway, caller: TheCaller) -> Batch:
    """Cancels the lines that have not ended; what has ended is kept."""
    return (await gateway.batches.cancel(caller, batch_id)).batch


def _window_s(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    window_s = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < window_s <= LONGEST_WINDOW_S:
        raise _refused("completion_window", "must be hours or days, from 1h to 7d", window)
    return window_s


def _refused(field: str, rule: str, got: str) -> InvalidRequest:
    return InvalidRequest.from_fault(field, rule, describe(got))
