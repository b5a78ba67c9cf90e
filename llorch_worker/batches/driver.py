"""Runs the lines of a batch, a bounded number at a time, and returns their ends in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from uuid import UUID, uuid5

from llorch_worker.batches.lines import End, Line, NotRun
from llorch_worker.client import AsyncClient, AsyncJob, BrokerUnavailable
from llorch_worker.contract import (
    Cancelled,
    JobLost,
    JobRequest,
    JobResult,
    LlorchError,
    ModelNotServed,
    QueueFull,
    request_digest,
)
from llorch_worker.contract.errors import BrokerRefused
from llorch_worker.contract.kinds import Result

RETRY_S = 1.0
LOOK_AGAIN_S = 30.0
"""After so long without a result a job is sent again. That changes nothing unless Redis lost it."""
CALLED_OFF_S = 10.0
"""How long a cancelled job may take to end."""
WINDOWS_AHEAD = 4
"""Ends are returned in order; behind a slow line, so many windows of jobs may run ahead."""
MOST_BYTES_AHEAD = 64 * 2**20

Adapt = Callable[[JobRequest, str], Awaitable[JobRequest]]
"""Changes a request before it is sent as the job with this id, or refuses it for now."""


async def _unchanged(request: JobRequest, _: str) -> JobRequest:
    return request


_JOBS = UUID("6f3c1d9e-52b0-4a41-9b53-1f6a3c1d8d10")


class Driver:
    """Runs one batch; ``window`` is the most jobs that it has in the queue at a time.

    A job's id follows from ``batch_id`` and its line, and the queue takes an id once. So a driver
    that takes over from a dead one finds the jobs that this one sent, and their results.
    """

    def __init__(
        self,
        client: AsyncClient,
        batch_id: UUID,
        *,
        window: int,
        adapt: Adapt = _unchanged,
        owner: str = "",
        on_wait: Callable[[QueueFull | ModelNotServed | BrokerUnavailable], None] = lambda _: None,
    ) -> None:
        """``owner``: see :meth:`Client.submit`; ``on_wait`` hears why nothing is sent now."""
        self._client = client
        self._batch_id = uuid5(_JOBS, str(batch_id))
        self._ahead = WINDOWS_AHEAD * window
        self._adapt = adapt
        self._owner = owner
        self._places = asyncio.Semaphore(window)
        # Submits run on threads, which would overtake each other.
        self._in_order = asyncio.Lock()
        self._on_wait = on_wait
        self._served: set[str | None] = set()
        """The models that took jobs, as requests name them."""
        self._stopped: asyncio.Future[NotRun] = asyncio.get_running_loop().create_future()

    @property
    def stopped(self) -> bool:
        return self._stopped.done()

    def stop(self, reason: NotRun) -> None:
        """Cancels the jobs in the queue. Lines without a result end as ``reason`` from now on."""
        if not self._stopped.done():
            self._stopped.set_result(reason)

    def job_id(self, line: Line, part: int = 0) -> str:
        return str(uuid5(self._batch_id, f"{line.number}:{part}"))

    async def ends(self, lines: AsyncIterator[Line]) -> AsyncGenerator[tuple[Line, End]]:
        """Each line with its end, in order."""
        running: deque[tuple[Line, asyncio.Task[End]]] = deque()
        bytes_ahead = jobs_ahead = count = 0
        try:
            async for line in lines:
                # Only these may have been sent by an earlier driver.
                known = count < self._ahead
                running.append((line, asyncio.create_task(self._end(line, known=known))))
                bytes_ahead += line.size_bytes
                jobs_ahead += line.jobs
                count += 1
                while running and (
                    running[0][1].done()
                    or jobs_ahead >= self._ahead
                    or bytes_ahead > MOST_BYTES_AHEAD
                ):
                    first, end = running[0]
                    yield first, await end
                    running.popleft()
                    bytes_ahead -= first.size_bytes
                    jobs_ahead -= first.jobs
            while running:
                first, end = running[0]
                yield first, await end
                running.popleft()
        finally:
            for _, task in running:
                task.cancel()
            await asyncio.gather(*(task for _, task in running), return_exceptions=True)

    async def _end(self, line: Line, *, known: bool) -> End:
        if isinstance(line.requests, LlorchError):
            return line.requests
        digest = request_digest(line.requests)
        ends = await asyncio.gather(
            *(
                self._job_end(request, self.job_id(line, part), digest, known=known)
                for part, request in enumerate(line.requests)
            )
        )
        errors = [end for end in ends if isinstance(end, LlorchError)]
        if errors:
            return errors[0]
        return [end for end in ends if isinstance(end, JobResult)]

    async def _job_end(
        self, request: JobRequest, job_id: str, digest: str, *, known: bool
    ) -> JobResult | LlorchError:
        if "priority" not in request.model_fields_set:
            request = request.model_copy(update={"priority": "low"})
        async with self._places:
            while not self._stopped.done():
                try:
                    async with self._in_order:
                        if self._stopped.done():
                            break
                        adapted = await self._adapt(request, job_id)
                        known = True
                        job: AsyncJob[JobResult] = await self._client.submit(
                            adapted, job_id=job_id, owner=self._owner, digest=digest
                        )
                    self._served.add(request.model)
                    return await self._result(job)
                except TimeoutError:
                    continue
                except BrokerRefused:
                    raise
                except (QueueFull, ModelNotServed, BrokerUnavailable) as error:
                    # A Redis that lost its data forgot the models too. Workers announce them again.
                    if isinstance(error, ModelNotServed) and request.model not in self._served:
                        return error
                    self._on_wait(error)
                    await self._pause()
                except LlorchError as error:
                    return error
            return await self._called_off(job_id) if known else self._stopped.result()

    async def _result(self, job: AsyncJob[Result]) -> Result:
        """Raises ``TimeoutError`` if it does not come, if Redis lost the job, or if the batch is
        stopped."""
        result = asyncio.create_task(job.result())
        try:
            await asyncio.wait(
                (result, self._stopped), timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not result.done():
                raise TimeoutError
            return result.result()
        except JobLost:
            if (await job.status()).forgotten:
                # It would not run again, because its record says that it has ended.
                raise
            # `llorch purge` leaves no record either, so what it deletes of a batch is sent again.
            raise TimeoutError from None
        finally:
            result.cancel()

    async def _pause(self) -> None:
        await asyncio.wait((self._stopped,), timeout=RETRY_S)

    async def _called_off(self, job_id: str) -> JobResult | LlorchError:
        """The end of a job that may have been sent, after a cancel."""
        reason = self._stopped.result()
        job: AsyncJob[JobResult] = self._client.job(job_id)
        while True:
            try:
                if (await job.status()).state == "unknown":
                    return reason
                await job.cancel()
                return await job.result(CALLED_OFF_S)
            except (Cancelled, TimeoutError):
                return reason
            except LlorchError as error:
                return error
            except BrokerUnavailable:
                await asyncio.sleep(RETRY_S)
