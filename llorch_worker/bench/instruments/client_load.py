"""Jobs that a client submits all at once, measured at the client."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from llorch_worker.client import AsyncClient
from llorch_worker.contract import GenerationRequest, GenerationResult

RESULT_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Throughput:
    """The throughput of jobs submitted at once, from the submission to the last result."""

    jobs: int
    tokens: int
    """Generated tokens."""
    wall_s: float

    @property
    def jobs_per_s(self) -> float:
        return self.jobs / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def engine_s(result: GenerationResult) -> float:
    """The engine's own time on a job: from its first step to its last token."""
    return (result.timings.prefill_ms + result.timings.decode_ms) / 1e3


async def run_queued(redis_url: str, model: str, requests: list[GenerationRequest]) -> Throughput:
    """Run all ``requests`` through the real client, which waits for each result."""
    async with AsyncClient(redis_url, model=model) as client:

        async def wait(request: GenerationRequest) -> GenerationResult:
            return await (await client.submit(request)).result(RESULT_TIMEOUT_S)

        began_s = time.perf_counter()
        ended = await asyncio.gather(*map(wait, requests))
        wall_s = time.perf_counter() - began_s
    return Throughput(len(ended), sum(result.usage.completion for result in ended), wall_s)
