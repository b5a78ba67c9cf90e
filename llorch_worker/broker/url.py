"""URLs of a single Redis, and of one behind Sentinel.

    redis://[[user]:password@]host[:port][/db]
    unix://[[user]:password@]/path[?db=0]
    sentinel://[[user]:password@]host[:port][/db][;sentinel://host[:port]...][?master_name=mymaster]

``rediss://`` works as in redis-py, and so does ``unix://``, a Unix socket. As in Celery, semicolons
separate sentinels, and user, password and db are those of the Redis itself. Two options may follow:
``master_name``, by default ``mymaster``, and ``sentinel_password``, for sentinels that ask for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.backoff import NoBackoff
from redis.retry import Retry

from llorch_worker.contract.errors import InvalidUrl

SENTINEL = "sentinel"
UNIX = "unix"
SCHEMES = ("redis", "rediss", UNIX, SENTINEL)
CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster", "redis-cluster", "rediss-cluster")
NO_CLUSTER = "use a Redis with cluster mode disabled, at redis://, or several behind Sentinel, at sentinel://"
SEPARATOR = ";"
REDIS_PORT, SENTINEL_PORT = 6379, 26379
ASK_TIMEOUT_S = 1.0
"""How long a sentinel may take to say where the master is."""
DEFAULT_MASTER = "mymaster"
SENTINEL_OPTIONS = ("master_name", "sentinel_password")


def is_sentinel(url: str) -> bool:
    return url.startswith(f"{SENTINEL}://")


def is_unix(url: str) -> bool:
    return url.startswith(f"{UNIX}://")


def safe_url(url: str) -> str:
    """``url`` without its password and options."""
    parts, _ = _cut(url)
    return SEPARATOR.join(map(_safe_part, parts))


@contextmanager
def url_errors(url: str) -> Iterator[None]:
    """Checks ``url``, and turns each ValueError about it into :class:`InvalidUrl`."""
    try:
        _check(url)
        yield
    except ValueError as error:
        raise InvalidUrl(
            f"{safe_url(url)} is not a Redis URL: {str(error).removesuffix('.')}; "
            "set LLORCH_REDIS_URL"
        ) from None


@dataclass(frozen=True)
class SentinelUrl:
    """A parsed URL of sentinels."""

    sentinels: tuple[tuple[str, int], ...]
    master_name: str
    redis_options: dict[str, Any]
    """For the connections to the master."""
    sentinel_options: dict[str, Any]
    """For the connections to the sentinels, which are asked in turn."""
    bare: str
    """The URL without its options, as Celery and kombu read it."""

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Raises ValueError; see :func:`url_errors`."""
        parts, options = _parts(url)
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
            sentinel_options={"password": options.get("sentinel_password")} | _brief(),
            bare=SEPARATOR.join(f"{SENTINEL}://{part.netloc}/{db}" for part in parts),
        )

    @property
    def transport_options(self) -> dict[str, Any]:
        """Options for kombu's transport and Celery's result backend."""
        return {"master_name": self.master_name, "sentinel_kwargs": self.sentinel_options}


def _brief() -> dict[str, Any]:
    """Options for a connection to a sentinel: others can be asked too."""
    return {
        "socket_connect_timeout": ASK_TIMEOUT_S,
        "socket_timeout": ASK_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }


def _cut(url: str) -> tuple[list[str], str]:
    """The parts, one for each sentinel, and the options."""
    bare, _, query = url.partition("?")
    return bare.split(SEPARATOR) if is_sentinel(url) else [bare], query


def _parts(url: str) -> tuple[list[SplitResult], dict[str, str]]:
    """The parts and the options; raises ValueError for an unknown option, and for parts that say
    different things."""
    texts, query = _cut(url)
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = ", ".join(sorted(options.keys() - set(SENTINEL_OPTIONS)))
    if unknown:
        raise ValueError(f"unknown option {unknown}; allowed: {', '.join(SENTINEL_OPTIONS)}")
    blank = ", ".join(sorted(name for name, value in options.items() if not value))
    if blank:
        raise ValueError(f"option {blank} has no value")
    parts = [urlsplit(text) for text in texts]
    if any("," in part.netloc.rpartition("@")[2] for part in parts):
        raise ValueError(f"hosts are separated by {SEPARATOR!r}, each with its scheme")
    if (
        len({(part.username, part.password) for part in parts if part.username or part.password})
        > 1
    ):
        raise ValueError("all parts must have the same user and password, or none")
    return parts, options


def _check(url: str) -> None:
    """Raises ValueError for a URL that redis-py or Celery would misread."""
    if url != url.strip():
        raise ValueError("remove the surrounding whitespace")
    if url.partition("://")[0] in CLUSTER_SCHEMES:
        raise ValueError(f"Redis Cluster is not supported; {NO_CLUSTER}")
    parts, query = _cut(url)
    for part in parts:
        if not part.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
            *others, last = (f"{scheme}://" for scheme in SCHEMES)
            raise ValueError(f"it must begin with {', '.join(others)} or {last}")
        split = _split(part)
        # redis-py reads anything else as db 0; Celery raises an error of its own.
        database = split.path.removeprefix("/")
        if split.scheme == UNIX:
            _check_unix(split, query)
        elif database and not database.isdecimal():
            raise ValueError("it must end with a database number")


def _check_unix(split: SplitResult, query: str) -> None:
    if split.netloc.rpartition("@")[2] or not split.path.strip("/"):
        raise ValueError("it must name a socket by its whole path, as in unix:///run/redis.sock")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if options.keys() - {"db"} or not options.get("db", "0").isdecimal():
        raise ValueError("its only option is db, a number")


def _split(part: str) -> SplitResult:
    try:
        split = urlsplit(part)
        _ = split.port
        readable = split.scheme == UNIX or "://" not in part or "@" not in split.path
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
    if not split.netloc and split.scheme != UNIX:
        # localhost:6379, for example. Before an @ there may be a password.
        return part.rpartition("@")[2]
    host = split.hostname or ""
    host = f"[{host}]" if ":" in host else host
    user = f"{split.username or ''}:***@" if split.password else ""
    return f"{split.scheme}://{user}{host}{f':{split.port}' if split.port else ''}{split.path}"


def _first(values: Iterator[str | None]) -> str | None:
    found = next((value for value in values if value), None)
    return None if found is None else unquote(found)
