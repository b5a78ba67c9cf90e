"""A client that waits for its jobs, which end with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Self, TypeVar

from fastapi import Request

from llorch_worker.client import AsyncJob
from llorch_worker.contract import JobRequest
from llorch_worker.gateway.event_source import EventSource, begun_event_source
from llorch_worker.gateway.gateway import Gateway
from llorch_worker.gateway.hang_up import unless_hung_up
from llorch_worker.gateway.keys import Caller

Answer = TypeVar("Answer")


class Waiting:
    """The jobs that a client waits for. They end with it, unless an idempotency key says that it
    ``comes_back``. ``private``: then no text of them is left."""

    def __init__(
        self, gateway: Gateway, caller: Caller, *, comes_back: bool, private: bool = False
    ) -> None:
        self._gateway = gateway
        self._caller = caller
        self._comes_back = comes_back
        self._private = private
        self.jobs: list[AsyncJob[Any]] = []
        self.broken = False
        """Whether a stream ends before its jobs, with an error as its last event."""

    async def submit(self, generation: JobRequest, **options: Any) -> AsyncJob[Any]:
        """See :meth:`Gateway.submit`. If this job is refused, the earlier ones end too, and so do
        all if the client hangs up meanwhile."""
        sending = asyncio.ensure_future(
            self._gateway.submit(generation, self._caller, private=self._private, **options)
        )
        try:
            # Redis may take a job whose sending is given up, and nobody would cancel it.
            self.jobs.append(await asyncio.shield(sending))
        except BaseException:
            # A second cancellation ends the wait for it, and not the task that this makes.
            await asyncio.shield(self._end(sending))
            raise
        return self.jobs[-1]

    async def _end(self, sending: asyncio.Future[AsyncJob[Any]]) -> None:
        """Cancels all jobs, when that which is on its way has arrived or is refused."""
        with suppress(Exception):  # who waits for it raises it
            self.jobs.append(await sending)
        await self._leave(cancel=True)

    async def answer(self, request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
        """The result of ``work``, which is over when the client hangs up."""
        return await unless_hung_up(request, self._whole(work))

    async def stream(
        self,
        request: Request,
        events: AsyncGenerator[bytes],
        failure: Callable[[Exception], bytes],
    ) -> EventSource:
        """See :func:`begun_event_source`."""
        return await begun_event_source(request, self._each(events), failure)

    async def _whole(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        async with self:
            return await work

    async def _each(self, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        async with self, aclosing(events):
            async for event in events:
                yield event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._leave(cancel=self.broken or kind is not None)

    async def _leave(self, *, cancel: bool) -> None:
        """Cancels what nobody waits for any more, and gives the places in flight back."""
        if not (cancel and self._comes_back):
            forget = self._private and not self._comes_back
            await self._gateway.leave(self._caller, self.jobs, cancel=cancel, forget=forget)
