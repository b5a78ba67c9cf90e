"""Batches in Redis: their records, leases and progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import broker_errors
from llorch_worker.broker.fleet import leases
from llorch_worker.broker.scripts import run_script_async
from llorch_worker.gateway.batches.record import ENDED, Batch, BatchRecord, Counts
from llorch_worker.gateway.documents import Documents
from llorch_worker.gateway.errors import HttpError
from llorch_worker.gateway.fair_share import Due, due
from llorch_worker.gateway.files.record import FileRecord
from llorch_worker.gateway.keys import Caller

LEASE_S = 5.0


class LeaseLost(Exception):
    """Another gateway drives this batch now."""


class BatchStore(Documents[BatchRecord]):
    """All batches. A driver's ``token`` fences off the one before it: see ``batch_save.lua``."""

    _prefix = "batch_"
    _fields = ("document", "counts", "cancelling_at")

    def _also(self, pipe: Any, record: BatchRecord) -> None:
        pipe.hset(
            keys.gateway_document(record.id),
            mapping={"owner": record.owner, "created_at": record.created_at},
        )
        # A lease that has ended, so that a gateway takes it now.
        pipe.zadd(keys.BATCH_LEASES, {record.id: 0})

    async def waiting(self) -> list[Due]:
        """The batches that nobody drives, each with the time of its creation, the oldest first."""
        with broker_errors(self._url):
            found = await due(
                self._redis,
                keys.BATCH_LEASES,
                LEASE_S,
                keys.gateway_document,
                "owner",
                "created_at",
            )
        return sorted(found, key=lambda each: int(each.what or 0))

    async def claim(self, batch_id: str, token: str) -> BatchRecord | None:
        """The batch, if nobody drives it; its lease is now ``token``'s."""
        with broker_errors(self._url):
            lease = leases.due(keys.BATCH_LEASES, LEASE_S, 1, token=token, chosen=[batch_id])
            if await run_script_async(self._redis, *lease):
                (record,) = await self._read([batch_id])
                if record is not None:
                    return record
                # It has expired.
                await self._redis.zrem(keys.BATCH_LEASES, batch_id)
                await self._redis.delete(keys.gateway_document(batch_id))
        return None

    async def save(
        self,
        record: BatchRecord,
        token: str,
        *,
        whole: bool = True,
        lease_s: float | None = LEASE_S,
        keep_s: int = 0,
        files: Sequence[FileRecord] = (),
    ) -> int | None:
        """Saves the record, or its counts unless ``whole``, with new ``files``.

        ``lease_s``: from now on; None ends the lease and keeps the record for ``keep_s`` more.

        Returns when a cancel was requested, if one was.

        Raises:
            LeaseLost: nothing was saved.
        """
        named: list[str] = []
        written: list[str | float] = []
        for file in files:
            named += [keys.gateway_document(file.id), keys.gateway_documents("file", file.owner)]
            written += [file.id, time.time(), file.expires_at or "", file.model_dump_json()]
        with broker_errors(self._url):
            saved, *rest = await run_script_async(
                self._redis,
                "gateway/batch_save",
                [
                    record.id,
                    token,
                    "" if lease_s is None else int(lease_s * 1e3),
                    keep_s,
                    record.batch.request_counts.model_dump_json(),
                    record.model_dump_json() if whole else "",
                    *written,
                ],
                named,
            )
        if not saved:
            raise LeaseLost
        return int(rest[0]) if rest[0] else None

    async def cancel(self, caller: Caller, batch_id: str) -> BatchRecord:
        """Raises ``HttpError`` 404, or 409 if the batch has ended."""
        record = await self.get(caller, batch_id)
        with broker_errors(self._url):
            if await self._redis.zscore(keys.BATCH_LEASES, batch_id) is None:
                raise HttpError(409, "BATCH_ENDED", f"the batch is {record.batch.status} already")
            document, now_s = keys.gateway_document(batch_id), int(time.time())
            await self._redis.hsetnx(document, "cancelling_at", now_s)
        return await self.get(caller, batch_id)

    async def event(self, batch_id: str) -> tuple[str, Batch] | None:
        """A webhook's event of a batch; None until it has ended. Raises ``LookupError`` if Redis
        does not know it, or not any more."""
        (record,) = await self._read([batch_id])
        if record is None:
            raise LookupError(batch_id)
        batch = record.batch
        return (f"batch.{batch.status}", batch) if batch.status in ENDED else None

    def _record(self, values: Sequence[str | None]) -> BatchRecord:
        record = super()._record(values)
        _, counts, cancelling_at = values
        batch = record.batch
        if counts is not None:
            batch.request_counts = Counts.model_validate_json(counts)
        if cancelling_at is not None and batch.status in ("validating", "in_progress"):
            batch.status, batch.cancelling_at = "cancelling", int(cancelling_at)
        return record
