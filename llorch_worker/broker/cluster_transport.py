"""kombu's Redis transport for a Redis Cluster. kombu and Celery have none of their own.

It derives from the one for Sentinel, which also asks where the master is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu import transport as kombu_transports
from kombu.transport import redis as kombu_redis
from kombu.utils.url import parse_url
from redis import Redis
from redis.sentinel import Sentinel

from llorch_worker.broker.redis_cluster import (
    ClusterNodes,
    TaggedConnection,
    TaggedSSLConnection,
    prefix_of,
)
from llorch_worker.broker.url import KOMBU_CLUSTER


class FollowedChannel(kombu_redis.SentinelChannel):
    """A channel to the master that other servers name.

    It remembers their addresses: kombu forgets them with the connection, and a job that outlives it
    is settled all the same.
    """

    servers: type[Sentinel] = Sentinel
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
        manager = self.servers(self._addresses, sentinel_kwargs=self.sentinel_kwargs, **parameters)
        if asynchronous:
            self._async_sentinel_manager = manager
        else:
            self._sentinel_manager = manager
        return manager.master_for(self.master_name, Redis).connection_pool


class ClusterChannel(FollowedChannel):
    """A channel to the master of the fleet's slot."""

    connection_class = TaggedConnection
    connection_class_ssl = TaggedSSLConnection
    servers = ClusterNodes

    def sweep_bindings(self, limit: int = 100) -> int:
        # The script puts names together from its arguments.
        with self.conn_or_acquire() as client:
            prefix = prefix_of(client)
            begins = [self.keyprefix_queue % ("",), self.keyprefix_binding_permanent % ("",)]
            return int(
                self._sweep_bindings(
                    keys=[self.keyprefix_binding_deadlines],
                    args=[*(prefix + begin for begin in begins), limit],
                    client=client,
                )
            )


class ClusterTransport(kombu_redis.SentinelTransport):
    """A transport to the master of the fleet's slot."""

    default_port = kombu_redis.Transport.default_port
    Channel = ClusterChannel


def register() -> None:
    """Lets kombu know the scheme, unless a worker has its own transport for it."""
    kombu_transports.TRANSPORT_ALIASES.setdefault(
        KOMBU_CLUSTER, f"{__name__}:{ClusterTransport.__name__}"
    )
