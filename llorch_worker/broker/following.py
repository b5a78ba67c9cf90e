"""Connections that ask for the master whenever they connect.

redis-py's ask only when they are taken from their pool. To send a command again they go back to the
last address, which is that of the master that was demoted.
"""

from __future__ import annotations

from typing import Any

import redis.asyncio.sentinel
import redis.sentinel


class FollowingConnection(redis.sentinel.SentinelManagedConnection):
    """A connection to the master that Sentinel names."""

    def send_packed_command(self, *args: Any, **options: Any) -> None:
        if self._sock is None:
            self.connect()
        super().send_packed_command(*args, **options)


class AsyncFollowingConnection(redis.asyncio.sentinel.SentinelManagedConnection):
    """:class:`FollowingConnection` for asyncio."""

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        if not self.is_connected:
            await self.connect()
        await super().send_packed_command(*args, **options)
