"""The events of several jobs as one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from llorch_worker.client import AsyncJob, StreamEntry
from llorch_worker.contract import (
    ERROR_CLASSES,
    Cancelled,
    CancelledEvent,
    DeadlineExceeded,
    Failed,
    Finished,
    GenerationRequest,
    GenerationResult,
    InternalError,
    ModelChanged,
    Restarted,
    Started,
    Tokens,
)
from llorch_worker.openai_api.fingerprint import SEPARATOR

PATIENCE_S = 30.0
"""How long Redis may be away before those who wait hear of it."""
MOST_UNREAD = 64
GRACE_S = 2.0
"""How long after their deadline the end of jobs may come."""

CHANGED = "the model was replaced, and what was sent is void; send the request again"

Progress = Started | Tokens | Finished


class OwnClock:
    """Limits the wait for jobs of these ``requests``, which are sent now, to their deadlines by
    this process' clock. Their workers, or others, end them sooner if they can."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        all_s = [request.deadline_s for request in requests if request.deadline_s is not None]
        ends = bool(all_s) and len(all_s) == len(requests)
        now_s = asyncio.get_running_loop().time()
        self._until_s = now_s + max(all_s) + GRACE_S if ends else None

    @asynccontextmanager
    async def limiting(self) -> AsyncIterator[None]:
        """Raises ``DeadlineExceeded`` if the block takes longer."""
        try:
            async with asyncio.timeout_at(self._until_s):
                yield
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed") from None

    async def each(self, entries: AsyncIterator[StreamEntry]) -> AsyncIterator[StreamEntry]:
        """``entries``. Raises ``DeadlineExceeded`` if one comes too late."""
        while True:
            async with self.limiting():
                entry = await anext(entries, None)
            if entry is None:
                return
            yield entry


class JobEvents:
    """Reads the streams of ``jobs``, each on a task of its own, until :meth:`close`.

    ``clock``: when they must have ended.
    """

    def __init__(self, jobs: Sequence[AsyncJob], clock: OwnClock | None = None) -> None:
        self._clock = clock or OwnClock([])
        self._queue: asyncio.Queue[tuple[int, Progress] | Exception] = asyncio.Queue(MOST_UNREAD)
        self._left = len(jobs)
        self._tasks = [asyncio.create_task(self._follow(*each)) for each in enumerate(jobs)]

    async def read(self) -> AsyncIterator[tuple[int, Progress]]:
        """Each event with the number of its job, until all jobs have finished.

        Raises:
            LlorchError: a job failed or was cancelled, or its deadline is long past.
            BrokerUnavailable: Redis does not answer.
        """
        while self._left:
            async with self._clock.limiting():
                found = await self._queue.get()
            match found:
                case Exception() as error:
                    raise error
                case job, event:
                    self._left -= isinstance(event, Finished)
                    yield job, event

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _follow(self, number: int, job: AsyncJob) -> None:
        started = has_text = False
        try:
            async for entry in job.stream(patience_s=PATIENCE_S):
                match entry.event:
                    case Failed(error=error):
                        kind = ERROR_CLASSES.get(error.code, InternalError)
                        raise kind(error.message, faults=error.faults)
                    case CancelledEvent():
                        raise Cancelled("the job was cancelled")
                    case Restarted():
                        if has_text:
                            raise ModelChanged(CHANGED)
                        continue
                    case Finished() if not started:
                        # The stream has expired, but not the result.
                        for event in _replayed(await job.result(patience_s=PATIENCE_S)):
                            await self._queue.put((number, event))
                started = True
                has_text = has_text or isinstance(entry.event, Tokens)
                await self._queue.put((number, entry.event))
        except Exception as error:  # noqa: BLE001 - the reader raises it
            await self._queue.put(error)


def _replayed(result: GenerationResult) -> Iterator[Started | Tokens]:
    """What the stream of an ended job said."""
    yield Started(
        worker=result.worker,
        model=result.model,
        model_fingerprint=result.model_fingerprint,
        arithmetic=SEPARATOR.join(result.arithmetic),
        attempt=result.attempts,
        prompt_tokens=result.usage.prompt,
        cached_tokens=result.usage.cached,
        queue_ms=result.timings.queue_ms,
    )
    for choice in result.choices:
        if choice.token_ids:
            yield Tokens(
                choice=choice.index,
                index=0,
                ids=choice.token_ids,
                text=choice.text,
                logprobs=choice.logprobs,
            )
