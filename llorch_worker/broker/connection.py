"""Connections to Redis and their errors."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from kombu.exceptions import OperationalError
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.client import PubSub
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.retry import Retry

from llorch_worker.broker.url import SentinelUrl, is_sentinel, safe_url, url_errors
from llorch_worker.contract.errors import BrokerRefused, BrokerUnavailable

CONNECT_TIMEOUT_S = 3.0
REPLY_TIMEOUT_S = 15.0
MAX_CONNECTIONS = 10_000
"""Every reader of a stream holds one; redis-py allows 100 by default."""
MOST_IDLE_SUBSCRIPTIONS = 16
"""Kept for the next who waits for a result."""
RETRIES = 2
"""A command that fails is sent again over a new connection. Redis is not waited for longer."""


def _options() -> dict[str, Any]:
    return {
        # As the worker's connection to its queues, so that Redis refuses the same in both places.
        "protocol": 2,
        "decode_responses": True,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
        "socket_keepalive": True,
        "health_check_interval": 15,
        "max_connections": MAX_CONNECTIONS,
    }


def connect(url: str, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> redis.Redis:
    """A client of the Redis at ``url``; connects on first use. Replies are str.

    redis-py's pool replaces connections that Redis closed, and behind Sentinel it asks for the
    master whenever it connects: nothing of ours is needed but ``retry``, for the command that finds
    the old master demoted, and :func:`close_idle`.
    """
    options = _options() | {
        "socket_timeout": reply_timeout_s,
        "retry": Retry(ExponentialBackoff(cap=0.2, base=0.02), RETRIES),
    }
    with url_errors(url):
        if not is_sentinel(url):
            return redis.Redis.from_url(url, **options)
        parsed = SentinelUrl.parse(url)
        sentinel = redis.sentinel.Sentinel(
            parsed.sentinels, sentinel_kwargs=parsed.sentinel_options
        )
        master: redis.Redis = sentinel.master_for(
            parsed.master_name, **options | parsed.redis_options
        )
        return master


def close_idle(client: redis.Redis) -> None:
    """Closes the connections of ``client`` that no thread uses at this moment.

    A thread that polls a socket while another closes it may sleep until its timeout.
    """
    client.connection_pool.disconnect(inuse_connections=False)


def connect_async(url: str) -> redis.asyncio.Redis:
    """As :func:`connect`, for asyncio."""
    from redis.asyncio.retry import Retry as AsyncRetry

    options = _options() | {"retry": AsyncRetry(ExponentialBackoff(cap=0.2, base=0.02), RETRIES)}
    with url_errors(url):
        if not is_sentinel(url):
            return redis.asyncio.Redis.from_url(url, **options)
        parsed = SentinelUrl.parse(url)
        sentinel = redis.asyncio.sentinel.Sentinel(
            parsed.sentinels,
            sentinel_kwargs=parsed.sentinel_options | {"retry": AsyncRetry(NoBackoff(), 0)},
        )
        master: redis.asyncio.Redis = sentinel.master_for(
            parsed.master_name, **options | parsed.redis_options
        )
        return master


@contextmanager
def subscribe(client: redis.Redis, channel: str) -> Iterator[PubSub]:
    """A subscription to one channel, renewed by redis-py whenever the connection is.

    ``get_message`` also returns the confirmation of each (re)subscription, of type ``subscribe``.
    Messages published before it may be missed.
    """
    pubsub = client.pubsub()
    try:
        pubsub.subscribe(channel)
        yield pubsub
    finally:
        pubsub.close()


class Subscriptions:
    """As :func:`subscribe`, but connections are kept for the next subscriber. Thread-safe.

    A message may be meant for an earlier subscriber: compare its channel.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._idle: deque[PubSub] = deque()
        self._pid = os.getpid()

    @contextmanager
    def to(self, channel: str) -> Iterator[PubSub]:
        pubsub = self._take()
        try:
            # Not when the previous subscriber left: it had a result and was in a hurry.
            if pubsub.channels:
                pubsub.unsubscribe()
            pubsub.subscribe(channel)
            yield pubsub
        except BaseException:
            pubsub.close()
            raise
        if len(self._idle) < MOST_IDLE_SUBSCRIPTIONS:
            self._idle.append(pubsub)
        else:
            pubsub.close()

    def close(self) -> None:
        # Two threads may empty it at once.
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _take(self) -> PubSub:
        if self._pid != os.getpid():
            # Forked: the connections are the parent's.
            self._idle, self._pid = deque(), os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            pubsub: PubSub = self._redis.pubsub()
            return pubsub


@contextmanager
def broker_errors(url: str) -> Iterator[None]:
    """Turns what redis-py and kombu raise into :class:`BrokerUnavailable`."""
    try:
        yield
    except (RedisError, OperationalError) as error:
        raise _told(url, error) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Redis refused a write, also one of a script, because it is at its ``maxmemory``."""
    return isinstance(error, RedisError) and "used memory > 'maxmemory'" in str(error)


def _told(url: str, error: BaseException) -> BrokerUnavailable:
    where = safe_url(url)
    if is_out_of_memory(error):
        return BrokerUnavailable(
            f"Redis at {where} is at its maxmemory and takes no more data; "
            "try again when jobs have ended, or raise maxmemory"
        )
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if isinstance(error, ResponseError | AuthenticationError):
        return BrokerRefused(f"Redis at {where} refuses: {reason}")
    return BrokerUnavailable(f"No Redis at {where}: {reason}; start one or set LLORCH_REDIS_URL")
