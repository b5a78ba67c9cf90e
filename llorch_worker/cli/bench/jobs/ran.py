"""One pass of jobs, and how it is made through the queue."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from llorch_worker.client import AsyncClient
from llorch_worker.contract import GenerationRequest, GenerationResult

RESULT_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Ran:
    """One pass: seconds in all, and of each job from its submission to its result."""

    wall_s: float
    results: list[GenerationResult]
    took_s: list[float]

    @property
    def tokens_per_s(self) -> float:
        return sum(result.usage.completion for result in self.results) / self.wall_s

    @property
    def delivery_s(self) -> list[float]:
        return [
            took - (result.timings.queue_ms + own_ms(result)) / 1e3
            for took, result in zip(self.took_s, self.results, strict=True)
        ]


def own_ms(result: GenerationResult) -> float:
    """The engine's own time on a job: from its first step to its last token."""
    return result.timings.prefill_ms + result.timings.decode_ms


async def run_queued(redis_url: str, model: str, requests: list[GenerationRequest]) -> Ran:
    """All ``requests`` through the real client, which waits for each result."""
    async with AsyncClient(redis_url, model=model) as client:

        async def wait(request: GenerationRequest) -> tuple[GenerationResult, float]:
            sent_s = time.perf_counter()
            job = await client.submit(request)
            return await job.result(RESULT_TIMEOUT_S), time.perf_counter() - sent_s

        began_s = time.perf_counter()
        ended = await asyncio.gather(*map(wait, requests))
        wall_s = time.perf_counter() - began_s
    return Ran(wall_s, [result for result, _ in ended], [took for _, took in ended])
