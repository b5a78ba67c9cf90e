"""Results as workers store them, and those who wait for them as Redis sees them."""

from __future__ import annotations

import asyncio

import redis

from llorch_worker.broker import keys
from llorch_worker.broker.jobs.results import failure_document
from llorch_worker.contract import InternalError
from tests.store import store_result
from tests.waiting import wait_until


class Results:
    """A Redis and its listeners seen from outside, and results stored as workers store them."""

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url, decode_responses=True)

    def end(
        self, job_id: str, error: InternalError | None = None, *, announced: bool = True
    ) -> None:
        document = failure_document(job_id, error or InternalError(f"the end of {job_id}"))
        store_result(self.redis, job_id, document, publish=announced)

    def calls(self, command: str) -> int:
        """How often any client sent that command."""
        figures = self.redis.info("commandstats").get(f"cmdstat_{command}")
        return figures["calls"] if figures else 0

    async def listened_to(self, *job_ids: str) -> None:
        """Waits until these jobs' results are listened to."""
        wanted = {keys.result(job_id) for job_id in job_ids}
        await asyncio.to_thread(wait_until, lambda: wanted <= self._channels())

    async def not_listened_to(self, job_id: str) -> None:
        """Waits until that job's result is not listened to."""
        await asyncio.to_thread(wait_until, lambda: keys.result(job_id) not in self._channels())

    def _channels(self) -> set[str]:
        return set(self.redis.pubsub_channels())
