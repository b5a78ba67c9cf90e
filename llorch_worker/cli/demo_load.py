"""The jobs of ``llorch demo``, followed and measured at the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from llorch_worker.bench.instruments.client_load import Throughput
from llorch_worker.bench.instruments.percentiles import percentiles_ms
from llorch_worker.client import AsyncClient
from llorch_worker.contract import Event, GenerationRequest, GenerationResult, LlorchError, Tokens

SILENCE_S = 60.0
"""How long a followed job may send no event, and how long its result may lag behind its stream."""


@dataclass(frozen=True)
class Measured:
    """A followed job: how it ended, and the time from its submission to its first token."""

    request: GenerationRequest
    end: GenerationResult | LlorchError
    first_token_s: float | None


@dataclass(frozen=True)
class Figures(Throughput):
    """All followed jobs, including those that failed."""

    failed: int
    first_token_p50_ms: float
    first_token_p95_ms: float


async def follow_jobs(
    redis_url: str,
    model: str,
    requests: list[GenerationRequest],
    *,
    on_event: Callable[[int, Event], None],
    on_end: Callable[[int], None],
) -> tuple[list[Measured], Figures]:
    """Submit all ``requests`` and follow the stream of each.

    ``on_event(number, event)`` is called for every event of job ``number``, and ``on_end(number)``
    once its result is available.
    """
    async with AsyncClient(redis_url, model=model) as client:
        began_s = time.perf_counter()

        async def follow(number: int, request: GenerationRequest) -> Measured:
            sent_s = time.perf_counter()
            first_token_s = None
            try:
                job = await client.submit(request, stream=True)
                async for entry in job.stream(timeout=SILENCE_S):
                    if first_token_s is None and isinstance(entry.event, Tokens):
                        first_token_s = time.perf_counter() - sent_s
                    on_event(number, entry.event)
                end: GenerationResult | LlorchError = await job.result(SILENCE_S)
            except LlorchError as error:
                end = error
            on_end(number)
            return Measured(request, end, first_token_s)

        measured = await asyncio.gather(*(follow(n, r) for n, r in enumerate(requests)))
        return measured, _figures(measured, time.perf_counter() - began_s)


def _figures(measured: list[Measured], wall_s: float) -> Figures:
    results = [job.end for job in measured if isinstance(job.end, GenerationResult)]
    firsts_s = [job.first_token_s for job in measured if job.first_token_s is not None]
    first = percentiles_ms(firsts_s or [0.0])
    return Figures(
        jobs=len(measured),
        failed=len(measured) - len(results),
        tokens=sum(result.usage.completion for result in results),
        wall_s=wall_s,
        first_token_p50_ms=first.p50,
        first_token_p95_ms=first.p95,
    )
