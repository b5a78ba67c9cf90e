"""A batch as clients see it, and what Redis keeps beside that."""

from __future__ import annotations

import uuid
from typing import Literal

from pydantic import BaseModel, Field

from llorch_worker.gateway.documents import Record

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")


class Counts(BaseModel):
    """Lines."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchFault(BaseModel):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchFault]


class Batch(BaseModel):
    """OpenAI's fields. Times are Unix times in seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None


class Part(BaseModel):
    """The answers to consecutive lines, written together. A file without bytes does not exist."""

    name: str
    counts: Counts
    """``total``: its lines."""
    output_bytes: int
    error_bytes: int


class BatchRecord(Record):
    batch: Batch
    input_path: str
    jobs_seed: uuid.UUID | None = None
    """What the ids of its jobs follow from, because they must not follow from its own."""
    output_keep_s: int | None = None
    """How long its files are kept, if it says so."""
    stopped_as: Literal["cancelled", "expired"] | None = None
    """How it will end, if it was stopped."""
    parts: list[Part] = Field(default_factory=list)
    """In the order of their lines, which follow each other without a gap."""

    @property
    def folder(self) -> str:
        """Where its parts and its output are, below the folder of files."""
        return f"batches/{self.id}"

    @property
    def number(self) -> uuid.UUID:
        """Of the batch for its driver."""
        return self.jobs_seed or uuid.UUID(self.id.removeprefix("batch_"))


def new_batch_id() -> str:
    return f"batch_{uuid.uuid4().hex}"
