"""URLs of a single Redis or of one behind Sentinel.

    redis://[[user]:password@]host[:port][/db]
    sentinel://[[user]:password@]host[:port][/db][;sentinel://host[:port]...][?master_name=mymaster]

``rediss://`` and ``unix://`` work as in redis-py. As in Celery, semicolons separate sentinels, and
user, password and db are those of the Redis itself. Two options may follow: ``master_name``,
by default ``mymaster``, and ``sentinel_password``, for sentinels that ask for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.backoff import NoBackoff
from redis.retry import Retry

from llorch_worker.contract.errors import BrokerRefused

SENTINEL = "sentinel"
SCHEMES = ("redis", "rediss", "unix", SENTINEL)
SEPARATOR = ";"
SENTINEL_PORT = 26379
SENTINEL_TIMEOUT_S = 1.0
DEFAULT_MASTER = "mymaster"
OPTIONS = ("master_name", "sentinel_password")


def is_sentinel(url: str) -> bool:
    return url.startswith(f"{SENTINEL}://")


def safe_url(url: str) -> str:
    """``url`` without its password and options."""
    parts, _ = _cut(url)
    return SEPARATOR.join(map(_safe_part, parts))


@contextmanager
def url_errors(url: str) -> Iterator[None]:
    """Checks ``url``, and turns each ValueError about it into :class:`BrokerRefused`."""
    try:
        _check(url)
        yield
    except ValueError as error:
        raise BrokerRefused(
            f"{safe_url(url)} is not a Redis URL: {str(error).removesuffix('.')}; "
            "set LLORCH_REDIS_URL"
        ) from None


@dataclass(frozen=True)
class SentinelUrl:
    """A parsed ``sentinel://`` URL."""

    sentinels: tuple[tuple[str, int], ...]
    master_name: str
    redis_options: dict[str, Any]
    """For the connections to the master."""
    sentinel_options: dict[str, Any]
    """For the connections to the sentinels, which are tried in turn."""
    bare: str
    """The URL without its options, as Celery and kombu read it."""

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Raises ValueError; see :func:`url_errors`."""
        texts, query = _cut(url)
        options = dict(parse_qsl(query))
        unknown = ", ".join(sorted(options.keys() - set(OPTIONS)))
        if unknown:
            raise ValueError(f"unknown option {unknown}; allowed: {', '.join(OPTIONS)}")
        parts = [urlsplit(text) for text in texts]
        if any(part.scheme != SENTINEL or not part.hostname for part in parts):
            raise ValueError("each part of a Sentinel URL must be sentinel://host:port")
        db = _first(part.path.strip("/") for part in parts) or "0"
        return cls(
            sentinels=tuple((str(part.hostname), part.port or SENTINEL_PORT) for part in parts),
            master_name=options.get("master_name", DEFAULT_MASTER),
            redis_options={
                "db": int(db),
                "username": _first(part.username for part in parts),
                "password": _first(part.password for part in parts),
            },
            sentinel_options={
                "password": options.get("sentinel_password"),
                "socket_connect_timeout": SENTINEL_TIMEOUT_S,
                "socket_timeout": SENTINEL_TIMEOUT_S,
                "retry": Retry(NoBackoff(), 0),
            },
            bare=SEPARATOR.join(f"{SENTINEL}://{part.netloc}/{db}" for part in parts),
        )

    @property
    def transport_options(self) -> dict[str, Any]:
        """Options for kombu's transport and Celery's result backend."""
        return {"master_name": self.master_name, "sentinel_kwargs": self.sentinel_options}


def _cut(url: str) -> tuple[list[str], str]:
    """The parts, one for each sentinel, and the options."""
    bare, _, query = url.partition("?")
    return bare.split(SEPARATOR) if is_sentinel(url) else [bare], query


def _check(url: str) -> None:
    """Raises ValueError for a URL that redis-py or Celery would misread."""
    if url != url.strip():
        raise ValueError("remove the surrounding whitespace")
    parts, _ = _cut(url)
    for part in parts:
        if not part.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
            *others, last = (f"{scheme}://" for scheme in SCHEMES)
            raise ValueError(f"it must begin with {', '.join(others)} or {last}")
        split = _split(part)
        # redis-py reads anything else as db 0; Celery raises an error of its own.
        database = split.path.removeprefix("/")
        if split.scheme != "unix" and database and not database.isdecimal():
            raise ValueError("it must end with a database number")


def _split(part: str) -> SplitResult:
    try:
        split = urlsplit(part)
        _ = split.port
        readable = split.scheme == "unix" or "://" not in part or "@" not in split.path
    except ValueError:
        # The error's message may quote part of a password.
        readable = False
    if not readable or split.fragment:
        raise ValueError("cannot read host and port; percent-encode / ? # [ ] in a password")
    return split


def _safe_part(part: str) -> str:
    try:
        split = _split(part)
    except ValueError:
        return "an unreadable URL"
    if not split.netloc and split.scheme != "unix":
        # localhost:6379, for example. Before an @ there may be a password.
        return part.rpartition("@")[2]
    host = split.hostname or ""
    host = f"[{host}]" if ":" in host else host
    user = f"{split.username or ''}:***@" if split.password else ""
    return f"{split.scheme}://{user}{host}{f':{split.port}' if split.port else ''}{split.path}"


def _first(values: Iterator[str | None]) -> str | None:
    found = next((value for value in values if value), None)
    return None if found is None else unquote(found)
