"""Takes batches that nobody drives, and drives them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from llorch_worker.broker.connections.outage import RedisOutage
from llorch_worker.client import BrokerUnavailable
from llorch_worker.client.cancelling import cancelled
from llorch_worker.contract.errors import defect_of
from llorch_worker.gateway.batches.record import BatchRecord
from llorch_worker.gateway.batches.run import BatchRun
from llorch_worker.gateway.batches.store import BatchStore, LeaseLost
from llorch_worker.gateway.fair_share import Due, fairly

logger = logging.getLogger(__name__)

POLL_S = 1.0
MOST_AT_ONCE = 8
"""Batches that one gateway drives. Others wait for another gateway, or for room."""
SLICE_S = 60.0
"""How long a batch is driven at least, if others wait, more keys than there are places."""

NewRun = Callable[[BatchRecord, str], BatchRun]
"""Makes the run of a batch under the token of a lease."""


class _UnderWay(NamedTuple):
    owner: str
    since_s: float


Runs = dict[asyncio.Task[None], _UnderWay]


async def drive_all(store: BatchStore, new_run: NewRun) -> None:
    """Drives batches until it is cancelled; then others may take over at once what has not
    ended."""
    runs: Runs = {}
    outage = RedisOutage("take batches")
    try:
        while True:
            try:
                waiting = await store.waiting()
                outage.over()
                if len(runs) >= MOST_AT_ONCE:
                    _give_way(runs, waiting)
                else:
                    await _begin(store, new_run, waiting, runs)
            except BrokerUnavailable as error:
                outage.failed(error)
            await asyncio.sleep(POLL_S)
    finally:
        await cancelled(*runs)


async def _begin(store: BatchStore, new_run: NewRun, waiting: list[Due], runs: Runs) -> None:
    """Raises ``BrokerUnavailable``."""
    for batch in fairly(waiting, _counts(runs), MOST_AT_ONCE - len(runs)):
        token = uuid.uuid4().hex
        try:
            record = await store.claim(batch.id, token)
        except ValueError as error:
            # Perhaps another version's. It may quote a prompt.
            logger.error("a batch cannot be read: %s", type(error).__name__)
            continue
        if record is not None:
            run = asyncio.create_task(_drive(new_run(record, token), record.id))
            runs[run] = _UnderWay(record.owner, time.monotonic())
            run.add_done_callback(runs.pop)


def _give_way(runs: Runs, waiting: list[Due]) -> None:
    """Ends a run for a key that waits with fewer; the batch waits again then."""
    counts = _counts(runs)
    if not waiting:
        return
    fewest = min(counts[each.owner] for each in waiting)
    most = max(counts.values())
    of_most = [run for run, under_way in runs.items() if counts[under_way.owner] == most]
    if most > fewest + 1:
        of_most[-1].cancel()
    elif most > fewest and time.monotonic() - runs[of_most[0]].since_s > SLICE_S:
        of_most[0].cancel()


def _counts(runs: Runs) -> Counter[str]:
    return Counter(under_way.owner for under_way in runs.values())


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
    except Exception as error:
        # The lease ends soon, and a gateway tries again.
        logger.error("batch %s failed", batch_id, exc_info=defect_of(error, "gateway"))
