"""The events of several jobs as one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from llorch_worker.client import AsyncJob
from llorch_worker.contract import (
    ERROR_CLASSES,
    Cancelled,
    CancelledEvent,
    Failed,
    Finished,
    InternalError,
    Started,
    Tokens,
)

PATIENCE_S = 30.0
"""How long Redis may be away before those who wait hear of it."""
MOST_UNREAD = 64

Progress = Started | Tokens | Finished


class JobEvents:
    """Reads the streams of ``jobs``, each on a task of its own, until :meth:`close`."""

    def __init__(self, jobs: Sequence[AsyncJob]) -> None:
        self._queue: asyncio.Queue[tuple[int, Progress] | Exception] = asyncio.Queue(MOST_UNREAD)
        self._left = len(jobs)
        self._tasks = [asyncio.create_task(self._follow(*each)) for each in enumerate(jobs)]

    async def read(self) -> AsyncIterator[tuple[int, Progress]]:
        """Each event with the number of its job, until all jobs have finished.

        Raises:
            LlorchError: a job failed or was cancelled.
            BrokerUnavailable: Redis does not answer.
        """
        while self._left:
            match await self._queue.get():
                case Exception() as error:
                    raise error
                case job, event:
                    self._left -= isinstance(event, Finished)
                    yield job, event

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _follow(self, number: int, job: AsyncJob) -> None:
        try:
            async for entry in job.stream(patience_s=PATIENCE_S):
                match entry.event:
                    case Failed(error=error):
                        kind = ERROR_CLASSES.get(error.code, InternalError)
                        raise kind(error.message, faults=error.faults)
                    case CancelledEvent():
                        raise Cancelled("the job was cancelled")
                    case event:
                        await self._queue.put((number, event))
        except Exception as error:  # noqa: BLE001 - the reader raises it
            await self._queue.put(error)
