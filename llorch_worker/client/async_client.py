"""The asyncio client: :mod:`llorch_worker.client.client` without a thread for each reader."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, Self, cast, overload

from llorch_worker.broker.connections.connection import connect_async
from llorch_worker.broker.fleet.registry import ModelCard, WorkerCard
from llorch_worker.broker.jobs.results import StoredState
from llorch_worker.client.client import Client, Job
from llorch_worker.client.feed import Feed
from llorch_worker.client.listener import Listener, decoded
from llorch_worker.client.lost import Trace
from llorch_worker.client.patience import Patience
from llorch_worker.client.status import JobStatus
from llorch_worker.client.stream import (
    FROM_THE_START,
    READ_COUNT,
    RECHECK_S,
    Position,
    StreamCursor,
    StreamEntry,
)
from llorch_worker.contract import (
    EmbeddingResult,
    EmbedRequest,
    GenerationRequest,
    JobRequest,
    LlorchError,
    RerankRequest,
    RerankResult,
    ScoreRequest,
    ScoreResult,
)
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.contract.kinds import Result
from llorch_worker.settings import Settings

MOST_LOOKS = 32
"""Readers that look at their streams at a time. All do when Redis is back."""


class AsyncClient:
    """:class:`Client` for asyncio. It belongs to one event loop at a time.

    Short calls (submit, cancel, status) run on a thread; stream and result are coroutines. All
    streams and results wait over one connection to Redis.
    """

    def __init__(self, settings: Settings | str | None = None, *, model: str | None = None) -> None:
        self._client = Client(settings, model=model)
        self.settings = self._client.settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connect()

    @overload
    async def submit(
        self, request: GenerationRequest | None = None, /, **fields: Any
    ) -> AsyncJob: ...

    @overload
    async def submit(self, request: JobRequest, /, **options: Any) -> AsyncJob[Any]: ...

    async def submit(self, request: JobRequest | None = None, /, **options: Any) -> AsyncJob[Any]:
        """See :meth:`Client.submit`."""
        submit: Callable[..., Job[Any]] = self._client.submit
        return AsyncJob(self, await asyncio.to_thread(submit, request, **options))

    async def embed(
        self, input: object, *, timeout: float | None = None, **fields: Any
    ) -> EmbeddingResult:
        """See :meth:`Client.embed`."""
        job = await self.submit(EmbedRequest(input=input, **fields))
        found = await job.result(timeout)
        assert isinstance(found, EmbeddingResult)
        return found

    async def rerank(
        self, query: object, documents: object, *, timeout: float | None = None, **fields: Any
    ) -> RerankResult:
        """See :meth:`Client.rerank`."""
        job = await self.submit(RerankRequest(query=query, documents=documents, **fields))
        found = await job.result(timeout)
        assert isinstance(found, RerankResult)
        return found

    async def score(
        self, text_1: object, text_2: object, *, timeout: float | None = None, **fields: Any
    ) -> ScoreResult:
        """See :meth:`Client.score`."""
        job = await self.submit(ScoreRequest(text_1=text_1, text_2=text_2, **fields))
        found = await job.result(timeout)
        assert isinstance(found, ScoreResult)
        return found

    def job(self, job_id: str, *, known: bool = False) -> AsyncJob[Any]:
        """See :meth:`Client.job`."""
        return AsyncJob(self, self._client.job(job_id, known=known))

    async def models(self) -> list[ModelCard]:
        """See :meth:`Client.models`."""
        return await asyncio.to_thread(self._client.models)

    async def model_card(self, name: str | None = None) -> ModelCard:
        """See :meth:`Client.model_card`."""
        self._client._check_open()
        card = self._client._admission.fresh_card(name or self._client.model)
        if card is not None:
            # Without a thread: a gateway asks for each request.
            return card
        return await asyncio.to_thread(self._client.model_card, name)

    async def workers(self) -> list[WorkerCard]:
        """See :meth:`Client.workers`."""
        return await asyncio.to_thread(self._client.workers)

    async def close(self) -> None:
        self._enter_loop()
        await self._listener.close()
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
        self._listener = Listener(self.redis)
        self._looks = asyncio.Semaphore(MOST_LOOKS)

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


class AsyncJob(Generic[Result]):
    """:class:`Job` for asyncio."""

    def __init__(self, client: AsyncClient, job: Job[Result]) -> None:
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
    ) -> AsyncGenerator[StreamEntry]:
        """See :meth:`Job.stream`, and :class:`StreamCursor`. Outages of Redis of up to
        ``patience_s`` are only a pause."""
        cursor = StreamCursor(self.id, from_id, timeout)
        trace = self._sync._trace()
        patience = Patience(patience_s)
        self._client._enter_loop()
        with self._client._listener.following(self.id, patience_s) as feed:
            while not cursor.ended:
                message = await self._hear(feed, cursor, trace)
                if message is not None:
                    entries = cursor.news(message)
                else:
                    try:
                        reply, state = await self._look(cursor, trace)
                    except BrokerUnavailable as error:
                        await patience.bear(error)
                        feed.look()
                        continue
                    patience.relax()
                    if reply and len(reply[0][1]) == READ_COUNT:
                        feed.look()
                    entries = cursor.entries(reply, state)
                for entry in entries:
                    yield entry

    async def result(self, timeout: float | None = None, *, patience_s: float = 0.0) -> Result:
        """See :meth:`Job.result`. Outages of Redis of up to ``patience_s`` are only a pause."""
        try:
            async with asyncio.timeout(timeout):
                async with self._client._in_use():
                    end = await self._client._listener.end_of(
                        self.id, self._sync._trace(), patience_s
                    )
        except TimeoutError as error:
            raise TimeoutError(f"job {self.id} has not ended within {timeout} s") from error
        if isinstance(end, LlorchError):
            raise end
        return cast("Result", end)

    async def cancel(self) -> bool:
        """See :meth:`Job.cancel`."""
        return await asyncio.to_thread(self._sync.cancel)

    async def status(self) -> JobStatus:
        """See :meth:`Job.status`."""
        return await asyncio.to_thread(self._sync.status)

    async def _hear(self, feed: Feed, cursor: StreamCursor, trace: Trace) -> str | None:
        """The next message. None if it is time to look at the stream."""
        wait_s = RECHECK_S if trace.is_missing else math.inf
        left_s = cursor.left_s()
        if left_s is not None:
            wait_s = min(wait_s, left_s)
        async with self._client._in_use():
            return await feed.next(None if wait_s == math.inf else wait_s)

    async def _look(self, cursor: StreamCursor, trace: Trace) -> tuple[Any, StoredState | None]:
        """New entries, or the job's state if there are none."""
        async with self._client._in_use(), self._client._looks:
            reply = await self._read(cursor)
            state = None if reply else await self._state(trace)
            if state is not None and state.end is not None:
                # The last events may have arrived between the two commands.
                reply = await self._read(cursor)
        return reply, state

    async def _read(self, cursor: StreamCursor) -> Any:
        return await self._client.redis.xread({cursor.key: cursor.last_id}, count=READ_COUNT)

    async def _state(self, trace: Trace) -> StoredState:
        async with self._client.redis.pipeline(transaction=False) as pipe:
            reply = await trace.ask(pipe).execute()
        return await decoded(trace.document(reply))
