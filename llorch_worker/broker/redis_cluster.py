"""Connections to the master of a fleet's slot in a Redis Cluster.

The nodes are to a Cluster what sentinels are to a pair of Redis: whoever connects asks one of them
where the master is. So redis-py's pools and connections for Sentinel serve here too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import redis.asyncio.connection
import redis.asyncio.sentinel
import redis.connection
import redis.sentinel
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import TimeoutError as NoReply

from llorch_worker.broker.following import (
    AsyncFollowingConnection,
    AsyncSentinels,
    FollowingConnection,
)
from llorch_worker.broker.tagged_names import TaggedNames, key_prefix, slot_of

PREFIX_OPTION = "key_prefix"
"""The option of a connection that holds the prefix of all names."""
ASK_ANOTHER_S = 1.5
"""How long a question may last before it asks one more node. A silent one takes a second, and two
of them what a page or a scrape waits."""
_FIRST: dict[tuple[tuple[str, int], ...], int] = {}
"""Which of the nodes this process asks first, for each list of them."""


class TaggedConnection(FollowingConnection):
    """A connection to the master, on which all names begin with the hash tag."""

    def __init__(self, **options: Any) -> None:
        self._names = TaggedNames(options.pop(PREFIX_OPTION))
        super().__init__(**options)

    def connect_to(self, address: Any) -> None:
        self._names.connected()
        super().connect_to(address)

    def send_command(self, *args: Any, **options: Any) -> None:
        # A health check may send a command of its own before.
        super().send_command(*self._names.tagged(args), **options)
        self._names.sent(args[0])

    def pack_commands(self, commands: Any) -> Any:
        self._names.sent("")
        return super().pack_commands(self._names.all_tagged(commands))

    def read_response(self, *args: Any, **options: Any) -> Any:
        return self._names.bare(super().read_response(*args, **options))


class TaggedSSLConnection(TaggedConnection, redis.connection.SSLConnection):
    """:class:`TaggedConnection` with TLS."""


class AsyncTaggedConnection(AsyncFollowingConnection):
    """:class:`TaggedConnection` for asyncio."""

    def __init__(self, **options: Any) -> None:
        self._names = TaggedNames(options.pop(PREFIX_OPTION))
        super().__init__(**options)

    async def connect_to(self, address: Any) -> None:
        self._names.connected()
        await super().connect_to(address)

    async def send_command(self, *args: Any, **options: Any) -> None:
        await super().send_command(*self._names.tagged(args), **options)
        self._names.sent(args[0])

    def pack_commands(self, commands: Any) -> Any:
        self._names.sent("")
        return super().pack_commands(self._names.all_tagged(commands))

    async def read_response(self, *args: Any, **options: Any) -> Any:
        return self._names.bare(await super().read_response(*args, **options))


class AsyncTaggedSSLConnection(AsyncTaggedConnection, redis.asyncio.connection.SSLConnection):
    """:class:`AsyncTaggedConnection` with TLS."""


class ClusterNodes(redis.sentinel.Sentinel):
    """Nodes that tell where the master of a tag's slot is.

    The tag is what redis-py calls the name of the service, and the nodes are its sentinels.
    """

    def __init__(
        self,
        nodes: Sequence[tuple[str, int]],
        *,
        sentinel_kwargs: Mapping[str, Any],
        **options: Any,
    ) -> None:
        """``sentinel_kwargs`` are for connections to the ``nodes``, the others to the master."""
        super().__init__(nodes, sentinel_kwargs=sentinel_kwargs, **options)

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port; raises MasterNotFoundError, a ConnectionError."""
        failures: list[RedisError] = []
        for node in _in_turn(self.sentinels):
            try:
                with node.pipeline(transaction=False) as pipe:
                    return _master(service_name, node, _ask(pipe).execute(False))
            except AuthenticationError:
                raise
            except (NoConnection, NoReply) as error:
                failures.append(error)
            finally:
                # All workers may ask the same node. Other threads may be asking it now.
                node.connection_pool.disconnect(inuse_connections=False)
        raise redis.sentinel.MasterNotFoundError(_told(failures)) from failures[-1]

    def master_for(self, service_name: str, *args: Any, **options: Any) -> Any:
        options = _tagged(service_name, self.connection_kwargs | options)
        connection = TaggedSSLConnection if options.get("ssl") else TaggedConnection
        return super().master_for(service_name, *args, **{"connection_class": connection} | options)


class AsyncClusterNodes(AsyncSentinels):
    """:class:`ClusterNodes` for asyncio."""

    async def ask(self, service_name: str) -> tuple[str, int]:
        failures: list[RedisError] = []
        for node in _in_turn(self.sentinels):
            try:
                async with node.pipeline(transaction=False) as pipe:
                    return _master(service_name, node, await _ask(pipe).execute(False))
            except AuthenticationError:
                raise
            except (NoConnection, NoReply) as error:
                failures.append(error)
            finally:
                await node.connection_pool.disconnect(inuse_connections=False)
        raise redis.asyncio.sentinel.MasterNotFoundError(_told(failures)) from failures[-1]

    def master_for(self, service_name: str, *args: Any, **options: Any) -> Any:
        options = _tagged(service_name, self.connection_kwargs | options)
        connection = AsyncTaggedSSLConnection if options.get("ssl") else AsyncTaggedConnection
        return super().master_for(service_name, *args, **{"connection_class": connection} | options)


def prefix_of(client: Any) -> str:
    """What the names of this client, or pipeline, begin with in Redis; "" outside a Cluster."""
    return str(client.connection_pool.connection_kwargs.get(PREFIX_OPTION, ""))


def _tagged(tag: str, options: dict[str, Any]) -> dict[str, Any]:
    # Replies that name keys differ in RESP3.
    return options | {PREFIX_OPTION: key_prefix(tag), "protocol": 2}


def _in_turn(nodes: Sequence[Any]) -> Iterator[Any]:
    """``nodes``, from the one on that told last, while there is time to ask another."""
    until_s = time.monotonic() + ASK_ANOTHER_S
    addresses = tuple(map(_address, nodes))
    place = _FIRST.get(addresses, 0)
    for _ in nodes:
        _FIRST[addresses] = place
        yield nodes[place]
        # It did not tell. The next question begins after it.
        place = (place + 1) % len(nodes)
        if time.monotonic() >= until_s:
            break
    _FIRST[addresses] = place


def _address(node: Any) -> tuple[str, int]:
    options = node.connection_pool.connection_kwargs
    return options["host"], options["port"]


def _ask(pipe: Any) -> Any:
    return pipe.execute_command("CLUSTER", "INFO").execute_command("CLUSTER", "SLOTS")


def _master(tag: str, node: Any, replies: list[Any]) -> tuple[str, int]:
    """Host and port of the master that serves the tag, as ``node`` told."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    state, ranges = replies
    slot = slot_of(tag)
    own_host, own_port = _address(node)
    where = f"{own_host}:{own_port}"
    # A node that the majority has lost knows nothing of later failovers.
    if b"cluster_state:ok" not in state:
        raise NoConnection(f"{where} says that the Cluster is down")
    for first, last, (host, port, *_), *_replicas in ranges:
        if first <= slot <= last:
            # A node that knows no name for itself leaves it to whoever reached it.
            named = (host or b"").decode()
            return own_host if named in ("", "?") else named, int(port)
    raise NoConnection(f"{where} knows no master of slot {slot}")


def _told(failures: list[RedisError]) -> str:
    return f"no node tells where the slot's master is: {'; '.join(map(str, failures))}"
