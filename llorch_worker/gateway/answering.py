"""From a body to its answer: its jobs, and their results at once or as a stream."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any

import anyio
from fastapi import Header, Request
from fastapi.responses import JSONResponse, Response
from redis.exceptions import RedisError
from sse_starlette import EventSourceResponse

from llorch_worker.broker.results import terminal_event
from llorch_worker.client import AsyncJob
from llorch_worker.contract import (
    DeadlineExceeded,
    Event,
    Finished,
    GenerationResult,
    Started,
    Tokens,
)
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.gateway.errors import ERRORS, as_told
from llorch_worker.gateway.gateway import Gateway
from llorch_worker.gateway.hang_up import unless_hung_up
from llorch_worker.gateway.job_events import PATIENCE_S, JobEvents, Progress
from llorch_worker.gateway.keys import Caller
from llorch_worker.openai_api.body import Body, Chunks
from llorch_worker.openai_api.errors import body_of

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 60.0
"""A reader that takes nothing for so long is gone."""
DRAIN_S = 10.0
"""How long streams may go on when the gateway is asked to stop."""
DONE = b"data: [DONE]\n\n"

IdempotencyKey = Annotated[str | None, Header()]


def answers(document: type[Mapping[str, Any]]) -> dict[int | str, dict[str, Any]]:
    """Documents the answers of an endpoint that gives ``document``, or a stream."""
    return {
        **ERRORS,
        200: {
            "model": document,
            "description": "The answer; with stream, its chunks as server-sent events.",
            "content": {"text/event-stream": {}},
        },
    }


class Answering:
    """One body and its jobs. Nobody else knows the jobs, so they end with their client, unless an
    idempotency key says that it may come back."""

    def __init__(self, request: Request, gateway: Gateway, caller: Caller, body: Body) -> None:
        """Raises ``InvalidRequest``."""
        self._request = request
        self._path = request.url.path
        self._gateway = gateway
        self._caller = caller
        self._body = body
        self._requests = body.to_requests()
        self._jobs: list[AsyncJob] = []
        self._created = int(time.time())

    async def respond(self) -> Response:
        """Raises ``LlorchError`` and ``BrokerUnavailable`` until the answer has begun."""
        await self._submit()
        if not self._body.stream:
            results = await unless_hung_up(self._request, self._results())
            return JSONResponse(self._body.answer(results, self._created))
        stream = self._stream()
        # An error before the first token is an answer of its own.
        first = await unless_hung_up(self._request, _first(stream))
        return EventSourceResponse(
            self._all(first, stream), send_timeout=SEND_TIMEOUT_S, shutdown_grace_period=DRAIN_S
        )

    async def _submit(self) -> None:
        try:
            for request in self._requests:
                self._jobs.append(await self._gateway.submit(request, self._caller))
        except BaseException:
            await self._leave(ended=False)
            raise

    async def _results(self) -> Sequence[GenerationResult]:
        ended = False
        try:
            results = await asyncio.gather(
                *(job.result(patience_s=PATIENCE_S) for job in self._jobs)
            )
            ended = True
            _refuse_nothing([terminal_event(result) for result in results])
            return results
        finally:
            await self._leave(ended)

    async def _stream(self) -> AsyncGenerator[bytes]:
        """Server-sent events. Raises only before the first; an error after it is one of them."""
        begun, ended = False, False
        chunks = self._body.chunks(self._requests, self._jobs[0].id, self._created)
        events = JobEvents(self._jobs)
        try:
            async for job, event in events.read():
                if not begun and isinstance(event, Finished):
                    _refuse_nothing([event])
                for document in await self._told(job, event, chunks):
                    begun = True
                    yield _sse(document)
            for document in chunks.end():
                yield _sse(document)
            ended = True
            yield DONE
        except Exception as error:
            if not begun:
                raise
            told = as_told(error)
            logger.warning("a stream of %s ends with %s", self._path, told.code)
            yield b"event: error\n" + _sse(body_of(told).model_dump(mode="json"))
        finally:
            events.close()
            await self._leave(ended)

    async def _told(self, job: int, event: Progress, chunks: Chunks) -> Iterable[Mapping[str, Any]]:
        match event:
            case Started():
                chunks.started(job, event)
                return ()
            case Tokens():
                return chunks.tokens(job, event)
        result = None
        if chunks.needs_results:
            result = await self._jobs[job].result(patience_s=PATIENCE_S)
        return chunks.finished(job, event, result)

    async def _all(self, first: bytes, stream: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
        async with aclosing(stream):
            try:
                yield first
                async for data in stream:
                    yield data
            except (asyncio.CancelledError, GeneratorExit):
                logger.info("499: the client of %s hung up", self._path)
                raise

    async def _leave(self, ended: bool) -> None:
        """Cancels what nobody waits for any more, and gives the places in flight back."""
        if not ended and self._body.idempotency_key is not None:
            return
        # Whoever hung up has cancelled this task already.
        with anyio.CancelScope(shield=True):
            for job in self._jobs:
                try:
                    if not ended:
                        await job.cancel()
                    await self._gateway.ended(self._caller, job)
                except (BrokerUnavailable, RedisError):
                    logger.warning("job %s goes on: Redis did not take its cancel", job.id)


def _refuse_nothing(ends: Iterable[Event]) -> None:
    """Raises ``DeadlineExceeded`` if no job has a token because of its deadline."""
    if all(
        isinstance(end, Finished) and end.finish_reason == "deadline" and not end.usage.completion
        for end in ends
    ):
        raise DeadlineExceeded("the deadline passed before the first token")


async def _first(stream: AsyncIterator[bytes]) -> bytes:
    return await anext(stream)


def _sse(document: Mapping[str, Any]) -> bytes:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return b"data: %b\n\n" % text.encode()
