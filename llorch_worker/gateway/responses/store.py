"""Responses in Redis, with their conversations."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from llorch_worker.broker import keys
from llorch_worker.broker.connection import broker_errors
from llorch_worker.gateway.errors import HttpError
from llorch_worker.openai_api.responses import PREFIX, ResponseRecord


class NotKept(HttpError):
    """Nobody made such a response with this key, or its time is over."""

    def __init__(self) -> None:
        super().__init__(404, "NOT_FOUND", "no such response; perhaps it is no longer kept")


class ResponseStore:
    """The responses of one caller. Those of others do not exist in it.

    Methods raise ``BrokerUnavailable`` if Redis does not answer.
    """

    def __init__(
        self, client: redis.asyncio.Redis, url: str, caller_name: str, *, ttl_s: int
    ) -> None:
        # redis-py's annotations cover all its clients at once.
        self._redis: Any = client
        self._url = url
        self._caller_name = caller_name
        self._ttl_s = ttl_s

    async def put(self, record: ResponseRecord) -> None:
        with broker_errors(self._url):
            document = record.model_dump_json(by_alias=True)
            await self._redis.set(self._key(record.job_id), document, ex=self._ttl_s)

    async def find(self, job_id: str) -> ResponseRecord | None:
        with broker_errors(self._url):
            document = await self._redis.get(self._key(job_id))
        return None if document is None else ResponseRecord.model_validate_json(document)

    async def get(self, response_id: str) -> ResponseRecord:
        """Raises ``NotKept``."""
        record = await self.find(response_id.removeprefix(PREFIX))
        if record is None or record.response.id != response_id:
            raise NotKept
        return record

    async def keep(self, record: ResponseRecord) -> None:
        """Keeps it for another whole time."""
        with broker_errors(self._url):
            await self._redis.expire(self._key(record.job_id), self._ttl_s)

    async def delete(self, record: ResponseRecord) -> None:
        with broker_errors(self._url):
            await self._redis.delete(self._key(record.job_id))

    def _key(self, job_id: str) -> str:
        return keys.response(self._caller_name, job_id)
