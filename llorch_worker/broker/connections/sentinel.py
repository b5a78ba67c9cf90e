"""Connections that follow the master that Sentinel names.

redis-py's ask for the master only when they are taken from their pool. To send a command again they
go back to the last address, which is that of the master that was demoted.

A connection that learns that its server is not the master any more is closed, and its caller gets a
ConnectionError, as in any outage.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio.sentinel
import redis.sentinel
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import ResponseError

from llorch_worker.broker.connections.time_limits import AsyncLimited, Limited

_DEMOTED = "UNBLOCKED"
"""What a server says to those whom it keeps waiting when it becomes a replica."""
_IN_SCRIPT, _AT_REPLICA = "Error running script", "-READONLY "
"""What Redis 6 says to a script that writes at a replica. Redis 7 says READONLY, as to commands."""


class FollowingConnection(Limited, redis.sentinel.SentinelManagedConnection):
    """A connection to the master."""

    def send_packed_command(self, *args: Any, **options: Any) -> None:
        if self._sock is None:
            self.connect()
        super().send_packed_command(*args, **options)

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except ResponseError as error:
            if not _is_demoted(error):
                raise
            self.disconnect()
            raise _not_now(error) from error


class AsyncFollowingConnection(AsyncLimited, redis.asyncio.sentinel.SentinelManagedConnection):
    """:class:`FollowingConnection` for asyncio."""

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        if not self.is_connected:
            await self.connect()
        await super().send_packed_command(*args, **options)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if not _is_demoted(error):
                raise
            await self.disconnect()
            raise _not_now(error) from error


class AsyncSentinels(redis.asyncio.sentinel.Sentinel):
    """Sentinels that are asked one question at a time.

    Thousands of readers connect at once when they have lost a master. Each would open a connection
    to a Sentinel, and redis-py allows 100.
    """

    _question: asyncio.Task[tuple[str, int]] | None = None

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port; raises MasterNotFoundError, a ConnectionError."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self.ask(service_name))
        # A reader that is cancelled leaves the question to the others.
        return await asyncio.shield(self._question)

    async def ask(self, service_name: str) -> tuple[str, int]:
        """Asks one after the other."""
        host, port = await super().discover_master(service_name)
        return host, port


def _is_demoted(error: ResponseError) -> bool:
    text = str(error)
    return text.startswith(_DEMOTED) or (text.startswith(_IN_SCRIPT) and _AT_REPLICA in text)


def _not_now(error: ResponseError) -> NoConnection:
    return NoConnection(f"the server is not the master now: {error}")
