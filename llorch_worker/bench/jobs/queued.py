"""One pass of jobs through the queue."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from llorch_worker.bench.throughput import Throughput
from llorch_worker.client import AsyncClient
from llorch_worker.contract import GenerationRequest, GenerationResult

RESULT_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class QueuedPass(Throughput):
    """With what Redis and Celery took of each job."""

    delivery_s: tuple[float, ...]
    """From the call of ``submit`` to the result, less waiting and computing."""


def own_ms(result: GenerationResult) -> float:
    """The engine's own time on a job: from its first step to its last token."""
    return result.timings.prefill_ms + result.timings.decode_ms


async def run_queued(redis_url: str, model: str, requests: list[GenerationRequest]) -> QueuedPass:
    """All ``requests`` through the real client, which waits for each result."""
    async with AsyncClient(redis_url, model=model) as client:

        async def wait(request: GenerationRequest) -> tuple[GenerationResult, float]:
            sent_s = time.perf_counter()
            job = await client.submit(request)
            return await job.result(RESULT_TIMEOUT_S), time.perf_counter() - sent_s

        began_s = time.perf_counter()
        ended = await asyncio.gather(*map(wait, requests))
        wall_s = time.perf_counter() - began_s
    return QueuedPass(
        jobs=len(ended),
        tokens=sum(result.usage.completion for result, _ in ended),
        wall_s=wall_s,
        delivery_s=tuple(
            took_s - (result.timings.queue_ms + own_ms(result)) / 1e3 for result, took_s in ended
        ),
    )
