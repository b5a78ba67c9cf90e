"""Records of files and batches in Redis, each seen only by the key that owns it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Self, TypeVar

import redis.asyncio
from pydantic import BaseModel

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import broker_errors
from llorch_worker.gateway.errors import HttpError
from llorch_worker.gateway.keys import Caller
from llorch_worker.gateway.ownership import may

READ_AT_ONCE = 500

Kind = Literal["file", "batch"]
Order = Literal["asc", "desc"]


class Record(BaseModel):
    """What every kind of record has. ``owner`` is the name of a key."""

    id: str
    owner: str
    created_at: int


AnyRecord = TypeVar("AnyRecord", bound=Record)
AnyDocument = TypeVar("AnyDocument")


class Page(BaseModel, Generic[AnyDocument]):
    """A part of a list, as OpenAI has it."""

    object: Literal["list"] = "list"
    data: list[AnyDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: Sequence[Any], *, more: bool) -> Self:
        ids = [each.id for each in data] or [None]
        return cls(data=list(data), first_id=ids[0], last_id=ids[-1], has_more=more)


class Documents(Generic[AnyRecord]):
    """The records of one kind. Every method raises ``BrokerUnavailable`` without Redis."""

    _prefix: str
    """Of the ids of this kind."""
    _fields: tuple[str, ...] = ("document",)
    """Of a record's hash."""

    def __init__(
        self, client: redis.asyncio.Redis, redis_url: str, kind: Kind, model: type[AnyRecord]
    ) -> None:
        # redis-py's annotations cover all its clients at once.
        self._redis: Any = client
        self._url = redis_url
        self._kind = kind
        self._model = model

    async def get(self, caller: Caller, record_id: str) -> AnyRecord:
        """Raises ``HttpError`` 404 if there is none with this id that ``caller`` may see."""
        mine = record_id.startswith(self._prefix)
        (record,) = await self._read([record_id]) if mine else (None,)
        if record is None or not may(caller, record.owner):
            raise HttpError(404, "NOT_FOUND", f"no such {self._kind}", param="id")
        return record

    async def page(
        self,
        owner: str,
        *,
        after: str | None,
        limit: int,
        order: Order = "desc",
        wanted: Callable[[AnyRecord], bool] = lambda _: True,
    ) -> tuple[list[AnyRecord], bool]:
        """At most ``limit`` records by time, those after the id ``after``; and whether more follow.

        Raises ``HttpError`` 404 if there is no ``after``.
        """
        index = keys.gateway_documents(self._kind, owner)
        start = 0
        found: list[AnyRecord] = []
        with broker_errors(self._url):
            if after is not None:
                rank = self._redis.zrank if order == "asc" else self._redis.zrevrank
                at = await rank(index, after)
                if at is None:
                    raise HttpError(404, "NOT_FOUND", f"no such {self._kind}", param="after")
                start = at + 1
            while True:
                stop = start + READ_AT_ONCE - 1
                ids = await self._redis.zrange(index, start, stop, desc=order == "desc")
                if not ids:
                    return found, False
                gone = []
                for record_id, record in zip(ids, await self._read(ids), strict=True):
                    if record is None:
                        gone.append(record_id)
                    elif wanted(record):
                        if len(found) == limit:
                            return found, True
                        found.append(record)
                if gone:
                    await self._redis.zrem(index, *gone)
                start += len(ids) - len(gone)

    async def add(self, record: AnyRecord, at_s: float) -> None:
        with broker_errors(self._url):
            async with self._redis.pipeline() as pipe:
                pipe.hset(keys.gateway_document(record.id), "document", record.model_dump_json())
                pipe.zadd(keys.gateway_documents(self._kind, record.owner), {record.id: at_s})
                self._also(pipe, record)
                await pipe.execute()

    def _also(self, pipe: Any, record: AnyRecord) -> None:
        """What else belongs to adding a record."""

    async def remove(self, record: AnyRecord) -> bool:
        """Whether it was there."""
        with broker_errors(self._url):
            async with self._redis.pipeline() as pipe:
                pipe.delete(keys.gateway_document(record.id))
                pipe.zrem(keys.gateway_documents(self._kind, record.owner), record.id)
                removed, _ = await pipe.execute()
        return bool(removed)

    async def _read(self, ids: list[str]) -> list[AnyRecord | None]:
        with broker_errors(self._url):
            async with self._redis.pipeline(transaction=False) as pipe:
                for record_id in ids:
                    pipe.hmget(keys.gateway_document(record_id), self._fields)
                replies = await pipe.execute()
        return [None if reply[0] is None else self._record(reply) for reply in replies]

    def _record(self, values: Sequence[str | None]) -> AnyRecord:
        """``values``: of the ``_fields``."""
        return self._model.model_validate_json(values[0] or "")
