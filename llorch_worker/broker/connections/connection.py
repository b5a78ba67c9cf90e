"""Connections to Redis and their errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import redis
import redis.asyncio
import redis.sentinel
from kombu.exceptions import OperationalError
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.client import PubSub
from redis.driver_info import DriverInfo
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from llorch_worker.broker.connections.sentinel import (
    AsyncFollowingConnection,
    AsyncSentinels,
    FollowingConnection,
)
from llorch_worker.broker.connections.time_limits import (
    CONNECT_TIMEOUT_S,
    REPLY_TIMEOUT_S,
    AsyncLimitedConnection,
    AsyncLimitedRetry,
    AsyncLimitedSSLConnection,
    AsyncLimitedUnixConnection,
    Greetings,
    LimitedConnection,
    LimitedRetry,
    LimitedSSLConnection,
    LimitedUnixConnection,
    NotThisRedis,
)
from llorch_worker.broker.connections.url import (
    NO_CLUSTER,
    SENTINEL,
    TLS,
    UNIX,
    RedisUrl,
    how_to_change,
    safe_url,
)
from llorch_worker.contract.errors import BrokerRefused, BrokerUnavailable

ASK_TIMEOUT_S = 1.0
"""How long a sentinel may take to say where the master is."""
ANSWER_S = 1.0
"""How long the reply of a command that blocks may take beyond its wait."""
IMPATIENT_S = 2.0
"""For pages and scrapes, which ask again; Prometheus waits for 5 s only."""
HEALTH_CHECK_S = 15
MAX_CONNECTIONS = 10_000
"""Every thread that waits holds one; redis-py allows 100 by default."""
RETRIES = 2
"""A failed command is sent again this often, each time over a new connection."""


def connect(
    url: str, *, reply_timeout_s: float | None = None, retries: int = RETRIES, decode: bool = True
) -> redis.Redis:
    """A client of the Redis at ``url``; connects on first use. Replies are str, or bytes without
    ``decode``. ``reply_timeout_s`` may only shorten what the URL says.

    redis-py's pool replaces connections that Redis closed, and behind Sentinel it asks for the
    master whenever it connects. This module adds a retry, for commands that reach a demoted
    master, and :func:`close_idle`.
    """
    limits: dict[str, Any] = {"reply_timeout_s": reply_timeout_s, "retries": retries}
    return cast(redis.Redis, _connect(url, _THREADED, decode=decode, **limits))


def connect_impatient(url: str) -> redis.Redis:
    """:func:`connect` for figures that somebody waits for: a reply that does not come within
    :data:`IMPATIENT_S` is an error, and a lost command is not sent again."""
    return connect(url, reply_timeout_s=IMPATIENT_S, retries=0)


def connect_async(url: str) -> redis.asyncio.Redis:
    """:func:`connect` for asyncio."""
    return cast(redis.asyncio.Redis, _connect(url, _ASYNCHRONOUS))


class _Kind(NamedTuple):
    """The classes for threads or for asyncio."""

    client: Any
    pool: Any
    retry: Any
    connections: dict[str, Any]
    """By the URL's scheme."""
    sentinels: Any


_THREADED = _Kind(
    redis.Redis,
    redis.ConnectionPool,
    LimitedRetry,
    {
        "redis": LimitedConnection,
        TLS: LimitedSSLConnection,
        UNIX: LimitedUnixConnection,
        SENTINEL: FollowingConnection,
    },
    redis.sentinel.Sentinel,
)
_ASYNCHRONOUS = _Kind(
    redis.asyncio.Redis,
    redis.asyncio.ConnectionPool,
    AsyncLimitedRetry,
    {
        "redis": AsyncLimitedConnection,
        TLS: AsyncLimitedSSLConnection,
        UNIX: AsyncLimitedUnixConnection,
        SENTINEL: AsyncFollowingConnection,
    },
    AsyncSentinels,
)


def _connect(
    url: str,
    kind: _Kind,
    *,
    reply_timeout_s: float | None = None,
    retries: int = RETRIES,
    decode: bool = True,
) -> Any:
    parsed = RedisUrl.parse(url)
    options: dict[str, Any] = {
        # Like the worker's connection to its queues, so that Redis refuses the same on both.
        "protocol": 2,
        "decode_responses": decode,
        # Messages of other producers may hold bytes that are not UTF-8.
        "encoding_errors": "surrogateescape",
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "max_connections": MAX_CONNECTIONS,
        # By default redis-py reads its version from its package's files for each connection. That
        # is nine tenths of what making one costs, and hundreds keep the loop from their greetings.
        "driver_info": DriverInfo(),
        "retry": kind.retry(ExponentialBackoff(cap=0.2, base=0.02), retries),
        "connection_class": kind.connections[parsed.scheme],
        "db": parsed.db,
        "username": parsed.username,
        "password": parsed.password,
    } | parsed.options
    if kind is _ASYNCHRONOUS:
        options["greetings"] = Greetings()
    if reply_timeout_s is not None:
        options["socket_timeout"] = min(reply_timeout_s, options["socket_timeout"])
    if parsed.scheme == UNIX:
        return kind.client.from_pool(kind.pool(path=parsed.path, **options))
    if parsed.scheme == SENTINEL:
        retry = kind.retry(NoBackoff(), 0)
        sentinels = kind.sentinels(
            parsed.servers, sentinel_kwargs=sentinel_options(parsed) | {"retry": retry}
        )
        return sentinels.master_for(parsed.master_name, **options)
    ((host, port),) = parsed.servers
    return kind.client.from_pool(kind.pool(host=host, port=port, **options))


def sentinel_options(parsed: RedisUrl) -> dict[str, Any]:
    """For a connection to a sentinel: others can be asked too."""
    return {
        "password": parsed.sentinel_password,
        "socket_connect_timeout": ASK_TIMEOUT_S,
        "socket_timeout": ASK_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }


def longest_wait_s(client: redis.Redis | redis.asyncio.Redis, most_s: float) -> float:
    """How long a command of ``client`` may block: ``most_s``, or less if it would not wait so long
    for the reply."""
    reply_timeout_s: float = client.get_connection_kwargs()["socket_timeout"]
    return min(most_s, reply_timeout_s - ANSWER_S)


def close_idle(client: redis.Redis) -> None:
    """Closes the connections of ``client`` that no thread is using.

    Closing a socket that another thread polls may leave that thread asleep until its timeout.
    """
    client.connection_pool.disconnect(inuse_connections=False)


@contextmanager
def subscribe(client: redis.Redis, channel: str) -> Iterator[PubSub]:
    """A subscription to one channel; redis-py renews it after each reconnect.

    ``get_message`` also returns the confirmation of each (re)subscription, of type ``subscribe``.
    Messages published before the confirmation may be missed.
    """
    pubsub = client.pubsub()
    try:
        pubsub.subscribe(channel)
        yield pubsub
    finally:
        pubsub.close()


@contextmanager
def own_connection(client: redis.Redis) -> Iterator[Any]:
    """A connection that is used for nothing else, then or later, such as one that subscribes."""
    connection = client.connection_pool.get_connection()
    try:
        yield connection
    finally:
        connection.disconnect()
        client.connection_pool.release(connection)


@contextmanager
def broker_errors(url: str) -> Iterator[None]:
    """Turns the errors of redis-py and kombu into :class:`BrokerUnavailable`."""
    try:
        yield
    except (RedisError, OperationalError) as error:
        raise _broker_error(url, error) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Redis refused a write, perhaps in a script, because it is at its ``maxmemory``."""
    return isinstance(error, RedisError) and "used memory > 'maxmemory'" in str(error)


def is_refused_write(error: BaseException) -> bool:
    """Whether Redis takes no writes for now: it is at its ``maxmemory``, became a replica, lacks
    replicas or cannot save to disk."""
    # In a script or a pipeline the code stands within the text, or only the class says so.
    codes = ("READONLY", "NOREPLICAS", "MISCONF")
    refused = isinstance(error, ResponseError) and any(code in str(error) for code in codes)
    return refused or isinstance(error, ReadOnlyError) or is_out_of_memory(error)


@contextmanager
def unless_refused() -> Iterator[None]:
    """A write that can be missed while Redis takes none."""
    try:
        yield
    except RedisError as error:
        if not is_refused_write(error):
            raise


def _broker_error(url: str, error: BaseException) -> BrokerUnavailable:
    where = safe_url(url)
    if is_out_of_memory(error):
        return BrokerUnavailable(
            f"Redis at {where} is at its maxmemory and accepts no more data; "
            "try again when jobs have ended, or raise maxmemory"
        )
    if isinstance(error, AskError | ClusterCrossSlotError | ClusterDownError):
        return BrokerRefused(f"Redis at {where} is in cluster mode; {NO_CLUSTER}")
    if isinstance(error, MasterNotFoundError):
        name = RedisUrl.parse(url).master_name
        return BrokerUnavailable(f"No Redis at {where}: no Sentinel there names a master {name}")
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if is_refused_write(error):
        return BrokerUnavailable(f"Redis at {where} takes no writes now: {reason}")
    if isinstance(error, ResponseError | AuthenticationError):
        return BrokerRefused(f"Redis at {where} refuses: {reason}")
    start = "" if isinstance(error, NotThisRedis) else "start one or "
    return BrokerUnavailable(f"No Redis at {where}: {reason}; {start}{how_to_change(url)}")
