"""What Redis keeps of a file."""

from __future__ import annotations

import uuid
from typing import Literal

from llorch_worker.gateway.documents import Documents, Record

Purpose = Literal["batch", "user_data", "batch_output"]


class FileRecord(Record):
    """``path``: where its bytes are, below the folder of files."""

    filename: str
    purpose: Purpose
    bytes: int
    path: str


class FileRecords(Documents[FileRecord]):
    _prefix = "file-"


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"
