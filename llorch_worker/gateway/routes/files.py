"""``/v1/files``: what batches read and write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Form, Query, Response, UploadFile
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from llorch_worker.contract import Fault, InvalidRequest, describe, shown
from llorch_worker.gateway.answering import say_ignored
from llorch_worker.gateway.documents import Order, Page
from llorch_worker.gateway.errors import ERRORS
from llorch_worker.gateway.files.record import (
    LEAST_KEPT_S,
    MOST_KEPT_S,
    FileRecord,
    Purpose,
    new_file_id,
    remove_bytes,
)
from llorch_worker.gateway.files.store import blocks_of, storage_errors
from llorch_worker.gateway.files.threads import in_thread
from llorch_worker.gateway.gateway import TheCaller, TheGateway
from llorch_worker.openai_api.known_fields import UNKNOWN

router = APIRouter(tags=["files"], responses=ERRORS)


FILE_BYTES = 200
"""A file in a list, about."""
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"


class FileUpload(BaseModel):
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    file: UploadFile
    purpose: Literal["batch", "user_data"]
    anchor: Literal["created_at"] | None = Field(None, alias=ANCHOR)
    """From when on the seconds count. Both or none are given."""
    seconds: int | None = Field(None, alias=SECONDS, ge=LEAST_KEPT_S, le=MOST_KEPT_S)
    """The file is deleted then. Without it, it is kept until somebody deletes it."""

    @property
    def unknown(self) -> list[str]:
        return list(self.model_extra or {})

    def faults(self, *, refuse_unknown: bool) -> Iterator[Fault]:
        if (self.anchor is None) != (self.seconds is None):
            missing, given = (ANCHOR, SECONDS) if self.anchor is None else (SECONDS, ANCHOR)
            yield Fault(field=missing, rule=f"must be given with {given}", got="null")
        if refuse_unknown:
            for name, value in (self.model_extra or {}).items():
                yield Fault(field=shown(name), rule=UNKNOWN.rule, got=describe(value))


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(Page[FileObject]):
    pass


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool


@router.post("/v1/files")
async def upload_file(
    gateway: TheGateway,
    caller: TheCaller,
    upload: Annotated[FileUpload, Form(media_type="multipart/form-data")],
    answer: Response,
) -> FileObject:
    """Keeps a file, until it expires or is deleted."""
    refuse_unknown = gateway.own.unknown_fields == "refuse"
    if faults := list(upload.faults(refuse_unknown=refuse_unknown)):
        raise InvalidRequest.from_faults(faults)
    say_ignored(answer, upload.unknown)
    now_s = time.time()
    file_id = new_file_id()
    path = f"uploads/{file_id}"
    with storage_errors():
        size = await gateway.file_store.copy_in(path, upload.file.file)
    record = FileRecord(
        id=file_id,
        owner=caller.name,
        created_at=int(now_s),
        filename=upload.file.filename or "upload",
        purpose=upload.purpose,
        bytes=size,
        path=path,
        expires_at=None if upload.seconds is None else int(now_s) + upload.seconds,
    )
    try:
        await gateway.files.add(record, now_s)
    except BaseException:
        # Nobody else would ever remove them.
        with suppress(OSError):
            await in_thread(remove_bytes, gateway.file_store, record)
        raise
    return _shown(record)


@router.get("/v1/files", response_model=FileList)
async def list_files(
    gateway: TheGateway,
    caller: TheCaller,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Order = "desc",
    purpose: str | None = None,
) -> Response:
    """The files of this key, by the time of their creation."""
    now_s = time.time()
    records, more = await gateway.files.page(
        caller.name,
        after=after,
        limit=limit,
        order=order,
        wanted=lambda record: purpose in (None, record.purpose) and not record.has_expired(now_s),
    )
    written = await gateway.bodies.run(
        len(records) * FILE_BYTES,
        lambda: FileList.of([*map(_shown, records)], more=more).model_dump_json().encode(),
    )
    return Response(written, media_type="application/json")


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, gateway: TheGateway, caller: TheCaller) -> FileObject:
    """What is known of a file."""
    return _shown(await gateway.files.get(caller, file_id))


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, gateway: TheGateway, caller: TheCaller) -> FileDeleted:
    """A batch that has begun to read the file may fail."""
    record = await gateway.files.get(caller, file_id)
    deleted = await gateway.files.remove(record)
    with storage_errors():
        await in_thread(remove_bytes, gateway.file_store, record)
    return FileDeleted(id=file_id, deleted=deleted)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def get_content(file_id: str, gateway: TheGateway, caller: TheCaller) -> StreamingResponse:
    """The file's bytes."""
    record = await gateway.files.get(caller, file_id)
    with storage_errors():
        file = await in_thread(gateway.file_store.open, record.path)
    return StreamingResponse(
        blocks_of(file),
        media_type="application/octet-stream",
        headers={"Content-Length": str(record.bytes)},
    )


def _shown(record: FileRecord) -> FileObject:
    return FileObject(**record.model_dump(include=set(FileObject.model_fields)))
