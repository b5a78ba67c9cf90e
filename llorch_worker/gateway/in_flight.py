"""How many jobs each key has in flight, counted in Redis by all gateways together."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from llorch_worker.broker import keys
from llorch_worker.broker.enqueue import LONGEST_WAIT_S
from llorch_worker.broker.scripts import run_script_async
from llorch_worker.gateway.errors import TooManyJobs
from llorch_worker.gateway.keys import Caller

ENQUEUED_WITHIN_S = 60.0


class InFlight:
    """Places for the jobs of keys that have a limit.

    A job takes its place before it is enqueued. Places of jobs that have ended are found again when
    they are needed, so nothing is lost with a gateway that dies.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        # redis-py's annotations cover all its clients at once.
        self._redis: Any = client

    async def take(self, caller: Caller, job_id: str) -> None:
        """Raises ``TooManyJobs`` if all places are taken."""
        if caller.max_jobs is None:
            return
        places = keys.key_jobs(caller.name)
        if await self._add(places, job_id, caller.max_jobs):
            return
        await self._free_ended(places)
        if not await self._add(places, job_id, caller.max_jobs):
            raise TooManyJobs(
                f"this key has {caller.max_jobs} jobs in flight, which is its limit; "
                "submit again when one has ended"
            )

    async def leave(self, caller: Caller, job_id: str) -> None:
        """Gives the place back early; the job ended, or was never enqueued."""
        if caller.max_jobs is not None:
            await self._redis.zrem(keys.key_jobs(caller.name), job_id)

    async def _add(self, places: str, job_id: str, limit: int) -> bool:
        keep_s = LONGEST_WAIT_S
        return bool(
            await run_script_async(
                self._redis, "count_in_flight", [job_id, limit, keep_s], [places]
            )
        )

    async def _free_ended(self, places: str) -> None:
        taken = await self._redis.zrange(places, 0, -1, withscores=True)
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id, _ in taken:
                pipe.hmget(keys.job(job_id), "state", "sent")
            records = await pipe.execute()
        # A job that has no record yet may be on its way into the queue.
        seconds, _ = await self._redis.time()
        long_ago_ms = (int(seconds) - ENQUEUED_WITHIN_S) * 1e3
        ended = [
            job_id
            for (job_id, since_ms), (state, sent) in zip(taken, records, strict=True)
            if state == "ended" or (state is None and sent is None and since_ms < long_ago_ms)
        ]
        if ended:
            await self._redis.zrem(places, *ended)
