"""Connections to Redis, and the one sentence that says why there is none."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from kombu.exceptions import OperationalError
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.client import PubSub
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.retry import Retry

from llorch_worker.broker.sentinel import SCHEME, SEPARATOR, SentinelUrl, is_sentinel
from llorch_worker.contract.errors import BrokerRefused, BrokerUnavailable

SCHEMES = ("redis", "rediss", "unix", SCHEME)
CONNECT_TIMEOUT_S = 3.0
REPLY_TIMEOUT_S = 15.0
MAX_CONNECTIONS = 10_000
"""Every reader of a stream holds one. With redis-py's own limit of 100 the next would fail."""
MOST_IDLE_SUBSCRIPTIONS = 16
"""Kept for the next who waits."""
RETRIES = 2
"""A connection that Redis closed while it was idle is opened again; an absent Redis is not
waited for."""


def safe_url(url: str) -> str:
    """``url`` without its password and options."""
    return SEPARATOR.join(_safe_part(part) for part in _parts(url))


def _parts(url: str) -> list[str]:
    """One for each sentinel, or the whole; without options."""
    bare = url.partition("?")[0]
    return bare.split(SEPARATOR) if is_sentinel(url) else [bare]


def _split(part: str) -> SplitResult:
    try:
        split = urlsplit(part)
        _ = split.port
        readable = split.scheme == "unix" or "://" not in part or "@" not in split.path
    except ValueError:
        # Its words quote what may be half of a password.
        readable = False
    if not readable or split.fragment:
        raise ValueError(
            "its host and port cannot be read; in a password, percent-encode / ? # [ ]"
        )
    return split


def _safe_part(url: str) -> str:
    try:
        parts = _split(url)
    except ValueError:
        return "a URL that cannot be read"
    if not parts.netloc and parts.scheme != "unix":
        # localhost:6379, say. What stands before an @ may be a password.
        return url.rpartition("@")[2].partition("?")[0]
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    user = f"{parts.username or ''}:***@" if parts.password else ""
    return f"{parts.scheme}://{user}{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _options() -> dict[str, Any]:
    return {
        # As the worker's connection to its queues: what Redis refuses there, it refuses here.
        "protocol": 2,
        "decode_responses": True,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
        "socket_keepalive": True,
        "health_check_interval": 15,
        "max_connections": MAX_CONNECTIONS,
    }


def connect(url: str, *, reply_timeout_s: float = REPLY_TIMEOUT_S) -> redis.Redis:
    """A client of the Redis at ``url``; connects on first use. Replies are str."""
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
def url_errors(url: str) -> Iterator[None]:
    """Checks what redis-py lets pass, and says of a URL that is none what is wrong with it."""
    try:
        _check_url(url)
        yield
    except ValueError as error:
        raise BrokerRefused(
            f"{safe_url(url)} is no Redis URL: {str(error).removesuffix('.')}; set LLORCH_REDIS_URL"
        ) from None


def _check_url(url: str) -> None:
    if url != url.strip():
        raise ValueError("there are blanks around it")
    for part in _parts(url):
        if not part.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
            *others, last = (f"{scheme}://" for scheme in SCHEMES)
            raise ValueError(f"it must begin with {', '.join(others)} or {last}")
        split = _split(part)
        # redis-py takes 0 instead, and Celery none.
        database = split.path.removeprefix("/")
        if split.scheme != "unix" and database and not database.isdecimal():
            raise ValueError("it must end with the number of a database")


@contextmanager
def subscribe(client: redis.Redis, channel: str) -> Iterator[PubSub]:
    """A subscription to one channel, renewed by redis-py whenever the connection is.

    ``get_message`` also returns the confirmation of each (re)subscription, of type ``subscribe``:
    what was published before it may have been missed.
    """
    pubsub = client.pubsub()
    try:
        pubsub.subscribe(channel)
        yield pubsub
    finally:
        pubsub.close()


class Subscriptions:
    """As :func:`subscribe`, on connections that are kept for the next: opening one costs Redis and
    us as much as a short job. Safe to share between threads.

    A message may be an earlier subscriber's: its channel tells.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._idle: deque[PubSub] = deque()
        self._pid = os.getpid()

    @contextmanager
    def to(self, channel: str) -> Iterator[PubSub]:
        pubsub = self._take()
        try:
            # Of the channel before only now: whoever leaves has a result, and hurries.
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
        # Two threads may empty it.
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
    """Whether Redis refused a write because it is at its ``maxmemory``. Scripts answer it within
    an error of their own."""
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
