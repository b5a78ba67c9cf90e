"""Takes batches that nobody drives, and drives them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from llorch_worker.broker.redis_outage import RedisOutage
from llorch_worker.client import BrokerUnavailable
from llorch_worker.client.cancelling import cancelled
from llorch_worker.gateway.batches.record import BatchRecord
from llorch_worker.gateway.batches.run import BatchRun
from llorch_worker.gateway.batches.store import BatchStore, LeaseLost

logger = logging.getLogger(__name__)

POLL_S = 1.0
MOST_AT_ONCE = 8
"""Batches that one gateway drives. Others wait for another gateway, or for their turn."""

NewRun = Callable[[BatchRecord, str], BatchRun]
"""Makes the run of a batch under the token of a lease."""


@asynccontextmanager
async def running(store: BatchStore, new_run: NewRun) -> AsyncIterator[None]:
    """Drives batches meanwhile; at the end others may take over at once what has not ended."""
    task = asyncio.create_task(_drive_all(store, new_run), name="llorch-batches")
    try:
        yield
    finally:
        await cancelled(task)


async def _drive_all(store: BatchStore, new_run: NewRun) -> None:
    runs: set[asyncio.Task[None]] = set()
    outage = RedisOutage("no batches are taken", "batches are taken again")
    try:
        while True:
            token = uuid.uuid4().hex
            record = await _claim(store, token, outage) if len(runs) < MOST_AT_ONCE else None
            if record is None:
                await asyncio.sleep(POLL_S)
                continue
            run = asyncio.create_task(_drive(new_run(record, token), record.id))
            runs.add(run)
            run.add_done_callback(runs.discard)
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def _claim(store: BatchStore, token: str, outage: RedisOutage) -> BatchRecord | None:
    try:
        record = await store.claim(token)
        outage.over()
        return record
    except BrokerUnavailable as error:
        outage.failed(error)
    except ValueError as error:
        # Perhaps another version's. It may quote a prompt.
        logger.error("a batch cannot be read: %s", type(error).__name__)
    return None


async def _drive(run: BatchRun, batch_id: str) -> None:
    try:
        await run.run()
    except LeaseLost:
        logger.info("batch %s: another gateway has taken it", batch_id)
    except asyncio.CancelledError:
        await run.release()
        raise
    except OSError as error:
        logger.warning("batch %s waits for its files: %s", batch_id, type(error).__name__)
    except Exception as error:  # noqa: BLE001 - one batch must not stop the others
        # It may quote a prompt. The lease ends soon, and a gateway tries again.
        logger.error("batch %s: a defect: %s", batch_id, type(error).__name__)
