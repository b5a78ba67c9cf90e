"""The asyncio client: :mod:`llorch_worker.client.client` without a thread for each reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect_async, unless_refused
from llorch_worker.broker.registry import ModelCard, WorkerCard
from llorch_worker.broker.results import StoredState
from llorch_worker.client.client import Client, Job
from llorch_worker.client.lost import Trace
from llorch_worker.client.patience import Patience
from llorch_worker.client.result_listener import ResultListener
from llorch_worker.client.status import JobStatus
from llorch_worker.client.stream import (
    FROM_THE_START,
    READ_COUNT,
    WATCH_TTL_S,
    Position,
    StreamCursor,
    StreamEntry,
)
from llorch_worker.contract import GenerationRequest, GenerationResult, LlorchError
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.settings import Settings


class AsyncClient:
    """:class:`Client` for asyncio. It belongs to one event loop at a time.

    Short calls (submit, cancel, status) run on a thread; stream and result are coroutines. Each
    stream holds a connection to Redis while it is read; all results share one.
    """

    def __init__(self, settings: Settings | str | None = None, *, model: str | None = None) -> None:
        self._client = Client(settings, model=model)
        self.settings = self._client.settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connect()

    async def submit(
        self,
        request: GenerationRequest | None = None,
        /,
        *,
        worker: str | None = None,
        job_id: str | None = None,
        owner: str = "",
        stream: bool = False,
        digest: str | None = None,
        **fields: Any,
    ) -> AsyncJob:
        """See :meth:`Client.submit`."""
        job = await asyncio.to_thread(
            self._client.submit,
            request,
            worker=worker,
            job_id=job_id,
            owner=owner,
            stream=stream,
            digest=digest,
            **fields,
        )
        return AsyncJob(self, job)

    def job(self, job_id: str, *, known: bool = False) -> AsyncJob:
        """See :meth:`Client.job`."""
        return AsyncJob(self, self._client.job(job_id, known=known))

    async def models(self) -> list[ModelCard]:
        """See :meth:`Client.models`."""
        return await asyncio.to_thread(self._client.models)

    async def model_card(self, name: str | None = None, *, worker: str | None = None) -> ModelCard:
        """See :meth:`Client.model_card`."""
        self._client._check_open()
        card = self._client._admission.fresh_card(name or self._client.model)
        if card is not None:
            # Without a thread: a gateway asks for each request.
            return card
        return await asyncio.to_thread(self._client.model_card, name, worker=worker)

    async def workers(self) -> list[WorkerCard]:
        """See :meth:`Client.workers`."""
        return await asyncio.to_thread(self._client.workers)

    async def close(self) -> None:
        self._enter_loop()
        await self._results.close()
        await asyncio.to_thread(self._client.close)
        await self.redis.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _in_use(self) -> AsyncIterator[None]:
        """See :meth:`Client._in_use`."""
        self._enter_loop()
        try:
            with self._client._in_use():
                yield
        finally:
            if self._client._closed:
                await self.redis.aclose()

    def _connect(self) -> None:
        self.redis = connect_async(self.settings.redis_url)
        self._results = ResultListener(self.redis)

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise RuntimeError(
                    "an AsyncClient belongs to one event loop; create a client for each loop"
                )
            # Connections and tasks of a closed loop are of no more use.
            self._connect()
        self._loop = loop


class AsyncJob:
    """:class:`Job` for asyncio."""

    def __init__(self, client: AsyncClient, job: Job) -> None:
        self.id = job.id
        self.generation_config = job.generation_config
        self._client = client
        self._sync = job

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id}>"

    async def stream(
        self,
        from_id: str | Position = FROM_THE_START,
        timeout: float | None = None,
        *,
        patience_s: float = 0.0,
    ) -> AsyncIterator[StreamEntry]:
        """See :meth:`Job.stream`, and :class:`StreamCursor`. Outages of Redis of up to
        ``patience_s`` are only a pause."""
        cursor = self._sync._cursor(from_id, timeout)
        trace = self._sync._trace()
        patience = Patience(patience_s)
        block_ms = None
        while not cursor.ended:
            try:
                reply, state = await self._look(cursor, block_ms, trace)
            except BrokerUnavailable as error:
                await patience.bear(error)
                continue
            patience.relax()
            for entry in cursor.entries(reply, state):
                yield entry
            block_ms = cursor.block_ms()

    async def result(
        self, timeout: float | None = None, *, patience_s: float = 0.0
    ) -> GenerationResult:
        """See :meth:`Job.result`. Outages of Redis of up to ``patience_s`` are only a pause."""
        try:
            async with asyncio.timeout(timeout):
                end = await self._end(Patience(patience_s), self._sync._trace())
        except TimeoutError as error:
            raise TimeoutError(f"job {self.id} has not ended within {timeout} s") from error
        if isinstance(end, LlorchError):
            raise end
        return end

    async def cancel(self) -> bool:
        """See :meth:`Job.cancel`."""
        return await asyncio.to_thread(self._sync.cancel)

    async def status(self) -> JobStatus:
        """See :meth:`Job.status`."""
        return await asyncio.to_thread(self._sync.status)

    async def _end(self, patience: Patience, trace: Trace) -> GenerationResult | LlorchError:
        while True:
            try:
                async with self._client._in_use():
                    return await self._client._results.end_of(self.id, trace)
            except BrokerUnavailable as error:
                await patience.bear(error)

    async def _look(
        self, cursor: StreamCursor, block_ms: int | None, trace: Trace
    ) -> tuple[Any, StoredState | None]:
        """New entries, or the job's state if there are none."""
        async with self._client._in_use():
            if cursor.must_announce():
                await self._announce_reader()
            reply = await self._read(cursor, block_ms)
            state = None if reply else await self._state(trace)
            if state is not None and state.end is not None:
                # The last events may have arrived between the two commands.
                reply = await self._read(cursor, None)
        return reply, state

    async def _announce_reader(self) -> None:
        # Reading works without the mark, only slower.
        with unless_refused():
            await self._client.redis.set(keys.watchers(self.id), 1, ex=WATCH_TTL_S)

    async def _read(self, cursor: StreamCursor, block_ms: int | None) -> Any:
        return await self._client.redis.xread(
            {cursor.key: cursor.last_id}, count=READ_COUNT, block=block_ms
        )

    async def _state(self, trace: Trace) -> StoredState:
        async with self._client.redis.pipeline(transaction=False) as pipe:
            return trace.state(await trace.ask(pipe).execute())
