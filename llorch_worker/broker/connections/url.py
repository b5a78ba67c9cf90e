"""URLs of a single Redis, and of one behind Sentinel.

    redis://[[user]:password@]host[:port][/db]
    unix://[[user]:password@]/path[?db=0]
    sentinel://[[user]:password@]host[:port][/db][;sentinel://host[:port]...][?master_name=mymaster]

``rediss://`` is with TLS, and ``unix://`` a Unix socket. As in Celery, semicolons separate
sentinels, and user, password and db are those of the Redis itself. Options follow a ``?``.
redis-py, kombu and Celery each know others, or read the same ones differently. So a URL is read
here alone, and each of them gets what it says in its own words: see :mod:`.connection` and
:mod:`..celery.producer`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from llorch_worker.contract.errors import InvalidUrl
from llorch_worker.settings import Settings

SENTINEL, UNIX, TLS = "sentinel", "unix", "rediss"
SCHEMES = ("redis", TLS, UNIX, SENTINEL)
CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster", "redis-cluster", "rediss-cluster")
NO_CLUSTER = "use a Redis with cluster mode disabled, at redis://, or several behind Sentinel, at sentinel://"
SEPARATOR = ";"
REDIS_PORT, SENTINEL_PORT = 6379, 26379
DEFAULT_MASTER = "mymaster"
VARIABLE = "LLORCH_REDIS_URL"
SHORTEST_REPLY_TIMEOUT_S = 2.0
"""Questions about tokens block a second less: see :func:`.longest_wait_s`."""


def in_brackets(host: str) -> str:
    """``host`` as it stands before a port: an address of IPv6 is ``[::1]``."""
    return f"[{host}]" if ":" in host else host


def _number(value: str) -> int:
    if not value.isdecimal():
        raise ValueError("must be a whole number")
    return int(value)


def _positive(value: str) -> int:
    number = _number(value)
    if not number:
        raise ValueError("must be at least 1")
    return number


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError("must be seconds, a number above 0")
    return seconds


def _reply_seconds(value: str) -> float:
    seconds = _seconds(value)
    if seconds < SHORTEST_REPLY_TIMEOUT_S:
        raise ValueError(f"must be at least {SHORTEST_REPLY_TIMEOUT_S:g} s, which readers wait")
    return seconds


def _flag(value: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if value.lower() not in words:
        raise ValueError("must be true or false")
    return words[value.lower()]


def _certificate_check(value: str) -> str:
    word = value.lower().removeprefix("cert_")
    if word not in ("required", "optional", "none"):
        raise ValueError("must be required, optional or none")
    return word


def _protocol(value: str) -> int:
    if value != "2":
        raise ValueError("must be 2")
    return 2


_Readers = dict[str, Callable[[str], Any]]
_COMMON: _Readers = {
    "db": _number,
    "virtual_host": lambda value: _number(value.removeprefix("/")),
    "username": str,
    "password": str,
    "client_name": str,
    "health_check_interval": _number,
    "max_connections": _positive,
    "protocol": _protocol,
    "socket_timeout": _reply_seconds,
}
_OF_TCP: _Readers = {"socket_connect_timeout": _seconds, "socket_keepalive": _flag}
_OF_TLS: _Readers = {
    "ssl_ca_certs": str,
    "ssl_cert_reqs": _certificate_check,
    "ssl_certfile": str,
    "ssl_check_hostname": _flag,
    "ssl_keyfile": str,
}
_OF_SENTINEL: _Readers = {"master_name": str, "sentinel_password": str}
_OPTIONS: Mapping[str, _Readers] = {
    "redis": _COMMON | _OF_TCP,
    TLS: _COMMON | _OF_TCP | _OF_TLS,
    UNIX: _COMMON,
    SENTINEL: _COMMON | _OF_TCP | _OF_SENTINEL,
}
"""Scheme -> its options, and how each is read."""


@dataclass(frozen=True)
class RedisUrl:
    """A parsed URL."""

    scheme: str
    servers: tuple[tuple[str, int], ...]
    """Host and port of the Redis, or of each sentinel; empty for a Unix socket."""
    path: str
    """Of the Unix socket."""
    db: int
    username: str | None
    password: str | None
    options: dict[str, Any]
    """The other options, as redis-py names them."""
    master_name: str
    sentinel_password: str | None

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises :class:`InvalidUrl`."""
        try:
            return _parse(url)
        except ValueError as error:
            raise InvalidUrl(
                f"{safe_url(url)} is not a Redis URL: {error}; {how_to_change(url)}"
            ) from None

    @property
    def login(self) -> str:
        """What stands before the host."""
        if not (self.username or self.password):
            return ""
        password = f":{quote(self.password, safe='')}" if self.password else ""
        return f"{quote(self.username or '', safe='')}{password}@"


def is_sentinel(url: str) -> bool:
    return url.startswith(f"{SENTINEL}://")


def is_unix(url: str) -> bool:
    return url.startswith(f"{UNIX}://")


def safe_url(url: str) -> str:
    """``url`` without its password and options."""
    parts, _ = _cut(url)
    return SEPARATOR.join(map(_safe_part, parts))


def how_to_change(url: str) -> str:
    """The remedy for a wrong URL: whoever gave it as an argument need set no variable."""
    # Settings are read from variables in either case.
    given = {value for name, value in os.environ.items() if name.upper() == VARIABLE and value}
    if url in given:
        return f"correct {VARIABLE}"
    if not given and url == Settings.model_fields["redis_url"].default:
        return f"set {VARIABLE}"
    return "correct the URL that the call or --redis gives"


def _parse(url: str) -> RedisUrl:
    if url != url.strip():
        raise ValueError("remove the surrounding whitespace")
    scheme = url.partition("://")[0]
    if scheme in CLUSTER_SCHEMES:
        raise ValueError(f"Redis Cluster is not supported; {NO_CLUSTER}")
    texts, query = _cut(url)
    if scheme not in SCHEMES or "://" not in url:
        *others, last = (f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"it must begin with {', '.join(others)} or {last}")
    parts = [_split(text) for text in texts]
    options = _options(scheme, query)
    numbers = {"path": _database(scheme, parts)} | {
        name: options.pop(name, None) for name in ("db", "virtual_host")
    }
    logins = {
        (part.username, part.password) for part in parts if part.username or part.password
    } or {(None, None)}
    if len(logins) > 1:
        raise ValueError("all parts must have the same user and password, or none")
    ((username, password),) = logins
    return RedisUrl(
        scheme=scheme,
        servers=_servers(scheme, parts),
        path=unquote(parts[0].path) if scheme == UNIX else "",
        db=_one("database", *numbers.values()) or 0,
        username=_one("user", username and unquote(username), options.pop("username", None)),
        password=_one("password", password and unquote(password), options.pop("password", None)),
        master_name=options.pop("master_name", DEFAULT_MASTER),
        sentinel_password=options.pop("sentinel_password", None),
        options=options,
    )


def _servers(scheme: str, parts: list[SplitResult]) -> tuple[tuple[str, int], ...]:
    if scheme == UNIX:
        (part,) = parts
        if part.netloc.rpartition("@")[2] or not part.path.strip("/"):
            raise ValueError(
                "it must name a socket by its whole path, as in unix:///run/redis.sock"
            )
        return ()
    if any("," in part.netloc.rpartition("@")[2] for part in parts):
        raise ValueError(f"hosts are separated by {SEPARATOR!r}, each with its scheme")
    if scheme != SENTINEL:
        (part,) = parts
        return ((unquote(part.hostname or "localhost"), part.port or REDIS_PORT),)
    if any(part.scheme != SENTINEL or not part.hostname for part in parts):
        raise ValueError("each part of a Sentinel URL must be sentinel://host:port")
    return tuple((unquote(str(part.hostname)), part.port or SENTINEL_PORT) for part in parts)


def _database(scheme: str, parts: list[SplitResult]) -> int | None:
    if scheme == UNIX:
        return None
    found = [text for part in parts if (text := part.path.removeprefix("/").rstrip("/"))]
    if not all(map(str.isdecimal, found)):
        raise ValueError("it must end with a database number")
    database: int | None = _one("database", *map(int, found))
    return database


def _options(scheme: str, query: str) -> dict[str, Any]:
    given = parse_qsl(query, keep_blank_values=True)
    readers = _OPTIONS[scheme]
    unknown = ", ".join(sorted({name for name, _ in given} - readers.keys()))
    if unknown:
        raise ValueError(f"unknown option {unknown}; allowed: {', '.join(sorted(readers))}")
    options: dict[str, Any] = {}
    for name, value in given:
        if not value:
            raise ValueError(f"option {name} has no value")
        if name in options:
            raise ValueError(f"option {name} is given twice")
        try:
            options[name] = readers[name](value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return options


def _one(what: str, *given: Any) -> Any:
    """The one value that is given, perhaps in several places."""
    found = {value for value in given if value is not None and value != ""}
    if len(found) > 1:
        raise ValueError(f"it gives more than one {what}")
    return found.pop() if found else None


def _cut(url: str) -> tuple[list[str], str]:
    """The parts, one for each sentinel, and the options."""
    bare, _, query = url.partition("?")
    return bare.split(SEPARATOR) if is_sentinel(url) else [bare], query


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
    host = in_brackets(split.hostname or "")
    user = f"{split.username or ''}:***@" if split.password else ""
    return f"{split.scheme}://{user}{host}{f':{split.port}' if split.port else ''}{split.path}"
