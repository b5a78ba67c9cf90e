"""kombu's channel to the master that Sentinel names, for jobs that outlive their connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu.transport import redis as kombu_redis
from kombu.utils.url import parse_url
from redis import Redis
from redis.sentinel import Sentinel

from llorch_worker.broker.following import FollowingConnection


class SentinelChannel(kombu_redis.SentinelChannel):
    """A channel that remembers the addresses of the sentinels.

    kombu forgets them with the connection, and a job that outlives it is settled all the same.
    """

    connection_class = FollowingConnection
    master_name: str
    sentinel_kwargs: dict[str, Any]
    _addresses: Sequence[tuple[str, int]]

    def _sentinel_managed_pool(self, asynchronous: bool = False) -> Any:
        parameters = self._connparams(asynchronous)
        first = parameters.pop("host"), parameters.pop("port")
        if self.connection is not None and self.connection.client is not None:
            default = self.connection.default_port
            parts = map(parse_url, self.connection.client.alt)
            self._addresses = [(part["hostname"], part["port"] or default) for part in parts] or [
                first
            ]
        manager = Sentinel(self._addresses, sentinel_kwargs=self.sentinel_kwargs, **parameters)
        if asynchronous:
            self._async_sentinel_manager = manager
        else:
            self._sentinel_manager = manager
        return manager.master_for(self.master_name, Redis).connection_pool
