"""Sends many jobs at once and measures them from where a client stands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles

from llorch_worker.bench.throughput import Throughput
from llorch_worker.client import AsyncClient
from llorch_worker.contract import (
    Event,
    GenerationRequest,
    GenerationResult,
    LlorchError,
    Tokens,
)

RESULT_TIMEOUT_S = 60.0
"""How long a job may say nothing, and how long its result may lag behind its stream."""


@dataclass(frozen=True)
class Measured:
    """One job: what came of it and, in seconds from its enqueueing, when."""

    request: GenerationRequest
    end: GenerationResult | LlorchError
    first_token_s: float | None
    ended_s: float


@dataclass(frozen=True)
class Figures(Throughput):
    """All jobs together, those that failed too; times are the client's."""

    failed: int
    first_token_p50_ms: float
    first_token_p95_ms: float


async def run_jobs(
    redis_url: str,
    model: str,
    requests: list[GenerationRequest],
    *,
    on_event: Callable[[int, Event], None],
    on_end: Callable[[int], None],
) -> tuple[list[Measured], float]:
    """Send all ``requests``, follow each over its stream; returns them and the seconds it took.

    ``on_event(number, event)`` is called for every event of job ``number``, ``on_end(number)``
    when its result is there.
    """
    async with AsyncClient(redis_url, model=model) as client:
        began_s = time.perf_counter()

        async def measure(number: int, request: GenerationRequest) -> Measured:
            sent_s = time.perf_counter()
            first_token_s = None
            try:
                job = await client.submit(request)
                async for entry in job.stream(timeout=RESULT_TIMEOUT_S):
                    if first_token_s is None and isinstance(entry.event, Tokens):
                        first_token_s = time.perf_counter() - sent_s
                    on_event(number, entry.event)
                end: GenerationResult | LlorchError = await job.result(RESULT_TIMEOUT_S)
            except LlorchError as error:
                end = error
            on_end(number)
            return Measured(request, end, first_token_s, time.perf_counter() - sent_s)

        measured = await asyncio.gather(*(measure(n, r) for n, r in enumerate(requests)))
        return measured, time.perf_counter() - began_s


def figures(measured: list[Measured], wall_s: float) -> Figures:
    """The figures of jobs that took ``wall_s`` seconds together."""
    results = [job.end for job in measured if isinstance(job.end, GenerationResult)]
    firsts_s = [job.first_token_s for job in measured if job.first_token_s is not None]
    cuts_s = quantiles(firsts_s, n=20, method="inclusive") if len(firsts_s) > 1 else [0.0] * 19
    return Figures(
        jobs=len(measured),
        failed=len(measured) - len(results),
        tokens=sum(result.usage.completion for result in results),
        wall_s=wall_s,
        first_token_p50_ms=cuts_s[9] * 1e3,
        first_token_p95_ms=cuts_s[18] * 1e3,
    )
