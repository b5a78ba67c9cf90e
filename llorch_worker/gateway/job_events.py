"""The events of several jobs as one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager

from llorch_worker.client import AsyncJob, StreamEntry
from llorch_worker.client.cancelling import cancelled
from llorch_worker.contract import (
    ERROR_CLASSES,
    Cancelled,
    CancelledEvent,
    DeadlineExceeded,
    Failed,
    Finished,
    GenerationResult,
    InternalError,
    JobRequest,
    ModelChanged,
    Restarted,
    Started,
    Tokens,
    Vectors,
)
from llorch_worker.openai_api.fingerprint import SEPARATOR

PATIENCE_S = 30.0
"""How long Redis may be away before those who wait hear of it."""
MOST_UNREAD = 64
GRACE_S = 2.0
"""How long after their deadline the end of jobs may come."""

CHANGED = "the job began again, and what was sent is void; send the request again"

Progress = Started | Tokens | Finished


class OwnClock:
    """Limits the wait for jobs of these ``requests``, which are sent now, to their deadlines by
    this process' clock. Their workers, or others, end them sooner if they can."""

    def __init__(self, requests: Sequence[JobRequest]) -> None:
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


async def job_events(
    jobs: Sequence[AsyncJob], clock: OwnClock
) -> AsyncGenerator[tuple[int, Progress]]:
    """Each event of ``jobs`` with the number of its job, until all have finished. Several are read
    each on a task of its own. ``clock``: when they must have ended.

    Raises:
        LlorchError: a job failed or was cancelled, or its deadline is long past.
        BrokerUnavailable: Redis does not answer.
    """
    left = len(jobs)
    async with aclosing(_events_of(0, jobs[0]) if left == 1 else _merged(jobs)) as events:
        while left:
            async with clock.limiting():
                job, event = await anext(events)
            left -= isinstance(event, Finished)
            yield job, event


async def _merged(jobs: Sequence[AsyncJob]) -> AsyncGenerator[tuple[int, Progress]]:
    queue: asyncio.Queue[tuple[int, Progress] | Exception] = asyncio.Queue(MOST_UNREAD)

    async def follow(number: int, job: AsyncJob) -> None:
        try:
            async with aclosing(_events_of(number, job)) as events:
                async for found in events:
                    await queue.put(found)
        except Exception as error:  # noqa: BLE001 - the reader raises it
            await queue.put(error)

    tasks = [asyncio.create_task(follow(*each)) for each in enumerate(jobs)]
    try:
        while True:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        await cancelled(*tasks)


async def _events_of(number: int, job: AsyncJob) -> AsyncGenerator[tuple[int, Progress]]:
    started = has_text = False
    async with aclosing(job.stream(patience_s=PATIENCE_S)) as entries:
        async for entry in entries:
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
                case Vectors():
                    continue  # of a job that no route of texts follows
                case Finished() if not started:
                    # The stream has expired, but not the result.
                    for event in _replayed(await job.result(patience_s=PATIENCE_S)):
                        yield number, event
            started = True
            has_text = has_text or isinstance(entry.event, Tokens)
            yield number, entry.event


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
    # A choice without output had no event. One here would hide that the deadline passed before the
    # first token (504).
    yield from (each for each in map(Tokens.of, result.choices) if each.has_any)
