"""What Redis keeps of a file, until it expires."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from typing import Any, Literal

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import broker_errors
from llorch_worker.broker.connections.outage import RedisOutage
from llorch_worker.client import BrokerUnavailable
from llorch_worker.gateway.documents import READ_AT_ONCE, Documents, Record
from llorch_worker.gateway.errors import HttpError
from llorch_worker.gateway.files.store import FileStore
from llorch_worker.gateway.files.threads import in_thread
from llorch_worker.gateway.keys import Caller

logger = logging.getLogger(__name__)

LEAST_KEPT_S, MOST_KEPT_S = 3_600, 30 * 24 * 3_600
"""What OpenAI lets a request ask for."""
Purpose = Literal["batch", "user_data", "batch_output"]
LOOK_S = 60.0
"""Between two looks. Nobody sees a file that has expired meanwhile."""


class FileRecord(Record):
    """``path``: where its bytes are, below the folder of files."""

    filename: str
    purpose: Purpose
    bytes: int
    path: str
    expires_at: int | None = None

    def has_expired(self, now_s: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now_s


class FileRecords(Documents[FileRecord]):
    _prefix = "file-"

    def _also(self, pipe: Any, record: FileRecord) -> None:
        if record.expires_at is not None:
            pipe.zadd(keys.FILES_DUE, {record.id: record.expires_at})

    async def get(self, caller: Caller, record_id: str) -> FileRecord:
        record = await super().get(caller, record_id)
        if record.has_expired(time.time()):
            raise HttpError(404, "NOT_FOUND", "this file has expired", param="id")
        return record

    async def remove(self, record: FileRecord) -> bool:
        removed = await super().remove(record)
        with broker_errors(self._url):
            await self._redis.zrem(keys.FILES_DUE, record.id)
        return removed

    async def remove_expired(self, store: FileStore, now_s: float) -> Counter[str]:
        """Removes the bytes and the records of what has expired by ``now_s``. All gateways may do
        so at once.

        Returns the names of the errors that kept files, each with their number. One file must not
        keep the others. Raises ``BrokerUnavailable``.
        """
        kept: Counter[str] = Counter()
        while due := await self._due(now_s, start=kept.total()):
            for file_id in due:
                try:
                    await self._remove_with_bytes(file_id, store)
                except BrokerUnavailable:
                    raise
                except Exception as error:  # noqa: BLE001 - object stores raise errors of their own
                    kept[type(error).__name__] += 1
        return kept

    async def _due(self, now_s: float, start: int) -> list[str]:
        with broker_errors(self._url):
            due: list[str] = await self._redis.zrangebyscore(
                keys.FILES_DUE, 0, now_s, start=start, num=READ_AT_ONCE
            )
        return due

    async def _remove_with_bytes(self, file_id: str, store: FileStore) -> None:
        (record,) = await self._read([file_id])
        if record is not None:
            # First: a gateway that dies in between leaves a record, by which another goes on.
            await in_thread(remove_bytes, store, record)
            await self.remove(record)
        else:
            with broker_errors(self._url):
                await self._redis.zrem(keys.FILES_DUE, file_id)


def remove_bytes(store: FileStore, record: FileRecord) -> None:
    """Blocks. The files of a batch have a folder of their own, which goes with the last one."""
    store.remove(record.path)
    if record.purpose == "batch_output":
        folder = record.path.rpartition("/")[0]
        # Its output and its errors differ in their endings alone. Any other is a part that stayed
        # because the gateway died at the batch's end.
        stem = record.path.rpartition(".")[0]
        for path in store.names(folder):
            if path.rpartition(".")[0] != stem:
                store.remove(path)
        store.remove_folder(folder)


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


async def remove_expired_files(records: FileRecords, store: FileStore) -> None:
    """Removes what has expired, again and again."""
    outage = RedisOutage("remove expired files")
    while True:
        try:
            kept = await records.remove_expired(store, time.time())
            outage.over()
            if kept:
                logger.warning(
                    "%d expired files are not removed yet: %s", kept.total(), ", ".join(kept)
                )
        except BrokerUnavailable as error:
            outage.failed(error)
        await asyncio.sleep(LOOK_S)
