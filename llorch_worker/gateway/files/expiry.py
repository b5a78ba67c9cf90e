"""Removes files that have expired."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llorch_worker.broker.redis_outage import RedisOutage
from llorch_worker.client import BrokerUnavailable
from llorch_worker.client.cancelling import cancelled
from llorch_worker.gateway.files.record import FileRecords
from llorch_worker.gateway.files.store import FileStore

logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""Between two looks. Nobody sees a file that has expired meanwhile."""


@asynccontextmanager
async def removing_expired(records: FileRecords, store: FileStore) -> AsyncIterator[None]:
    """The block, while a task removes what has expired."""
    task = asyncio.create_task(_remove_all(records, store), name="llorch-files")
    try:
        yield
    finally:
        await cancelled(task)


async def _remove_all(records: FileRecords, store: FileStore) -> None:
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
