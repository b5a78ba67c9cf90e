"""Responses in Redis, with their conversations."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import broker_errors
from llorch_worker.gateway.bodies import Bodies
from llorch_worker.gateway.errors import HttpError
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.ownership import may
from llorch_worker.openai_api.responses import PREFIX, ResponseRecord


class NotKept(HttpError):
    """Nobody made such a response with this key, or its time is over."""

    def __init__(self) -> None:
        super().__init__(404, "NOT_FOUND", "no such response; perhaps it is no longer kept")


class ResponseStore:
    """The responses that one caller may see. Others do not exist in it.

    Methods raise ``BrokerUnavailable`` if Redis does not answer.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        url: str,
        caller: Caller,
        bodies: Bodies,
        *,
        ttl_s: int,
    ) -> None:
        self.bodies = bodies
        # redis-py's annotations cover all its clients at once.
        self._redis: Any = client
        self._url = url
        self._caller = caller
        self._ttl_s = ttl_s

    async def put(self, record: ResponseRecord, size_bytes: int) -> None:
        """``size_bytes``: about those of its conversation."""
        owned = record.model_copy(update={"owner": self._caller.name})
        document = await self.bodies.run(size_bytes, lambda: owned.model_dump_json(by_alias=True))
        with broker_errors(self._url):
            await self._redis.set(keys.response(record.job_id), document, ex=self._ttl_s)

    async def find(self, job_id: str) -> ResponseRecord | None:
        found = await self._read(job_id)
        return found and found[0]

    async def get(self, response_id: str) -> ResponseRecord:
        """Raises ``NotKept``."""
        record, _ = await self.get_sized(response_id)
        return record

    async def get_sized(self, response_id: str) -> tuple[ResponseRecord, int]:
        """With its bytes of JSON. Raises ``NotKept``."""
        found = await self._read(response_id.removeprefix(PREFIX))
        if found is None or found[0].response.id != response_id:
            raise NotKept
        return found

    async def _read(self, job_id: str) -> tuple[ResponseRecord, int] | None:
        with broker_errors(self._url):
            document = await self._redis.get(keys.response(job_id))
        if document is None:
            return None
        record = await self.bodies.run(
            len(document), lambda: ResponseRecord.model_validate_json(document)
        )
        return (record, len(document)) if may(self._caller, record.owner) else None

    async def keep(self, record: ResponseRecord) -> None:
        """Keeps it for another whole time."""
        with broker_errors(self._url):
            await self._redis.expire(keys.response(record.job_id), self._ttl_s)

    async def delete(self, record: ResponseRecord) -> None:
        with broker_errors(self._url):
            await self._redis.delete(keys.response(record.job_id))
