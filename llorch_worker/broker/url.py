"""URLs of a single Redis, of one behind Sentinel, and of a Redis Cluster.

    redis://[[user]:password@]host[:port][/db]
    unix://[[user]:password@]/path[?db=0]
    sentinel://[[user]:password@]host[:port][/db][;sentinel://host[:port]...][?master_name=mymaster]
    redis+cluster://[[user]:password@]host[:port][;redis+cluster://host[:port]...][?tag=llorch]

``rediss://`` works as in redis-py, and so does ``unix://``, a Unix socket. As in Celery, semicolons
separate sentinels, and user, password and db are those of the Redis itself. Two options may follow:
``master_name``, by default ``mymaster``, and ``sentinel_password``, for sentinels that ask for one.

Semicolons also separate nodes of a Cluster; any of them will do. The option ``tag`` names the hash
tag that all keys of a fleet have in common, by default ``llorch``. ``rediss+cluster://`` is with
TLS, and takes the options in :data:`TLS_OPTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from redis.backoff import NoBackoff
from redis.retry import Retry

from llorch_worker.contract.errors import InvalidUrl

SENTINEL = "sentinel"
UNIX = "unix"
CLUSTER, TLS_CLUSTER = "redis+cluster", "rediss+cluster"
SCHEMES = ("redis", "rediss", UNIX, SENTINEL, CLUSTER, TLS_CLUSTER)
KOMBU_CLUSTER = "redis-cluster"
"""The scheme of a Cluster for kombu, which splits URLs at a plus."""
SEPARATOR = ";"
REDIS_PORT, SENTINEL_PORT = 6379, 26379
ASK_TIMEOUT_S = 1.0
"""How long a sentinel or a node may take to tell where the master is."""
DEFAULT_MASTER = "mymaster"
DEFAULT_TAG = "llorch"
SENTINEL_OPTIONS = ("master_name", "sentinel_password")
TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname",
)  # fmt: skip
CERT_REQS = ("required", "optional", "none")


def is_sentinel(url: str) -> bool:
    return url.startswith(f"{SENTINEL}://")


def is_cluster(url: str) -> bool:
    return url.startswith((f"{CLUSTER}://", f"{TLS_CLUSTER}://"))


def is_unix(url: str) -> bool:
    return url.startswith(f"{UNIX}://")


def is_followed(url: str) -> bool:
    """Whether it names servers that tell where the master is."""
    return is_sentinel(url) or is_cluster(url)


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
class FollowedUrl:
    """A parsed URL of servers that tell where the master is: sentinels, or nodes of a Cluster."""

    servers: tuple[tuple[str, int], ...]
    name: str
    """Of the master for Sentinel; the tag in a Cluster."""
    redis_options: dict[str, Any]
    """For the connections to the master."""
    server_options: dict[str, Any]
    """For the connections to the servers, which are asked in turn."""
    bare: str
    """The URL without its options, as Celery and kombu read it."""
    tls_options: dict[str, Any]
    """For a Cluster with TLS, as in Celery's ``broker_use_ssl``."""

    @classmethod
    def parse(cls, url: str) -> FollowedUrl:
        """Raises ValueError; see :func:`url_errors`."""
        return _of_sentinels(url) if is_sentinel(url) else _of_cluster(url)

    @property
    def transport_options(self) -> dict[str, Any]:
        """Options for kombu's transport and Celery's result backend, or for ours in a Cluster."""
        return {"master_name": self.name, "sentinel_kwargs": self.server_options}


def _of_sentinels(url: str) -> FollowedUrl:
    parts, options = _parts(url, SENTINEL_OPTIONS)
    if any(part.scheme != SENTINEL or not part.hostname for part in parts):
        raise ValueError("each part of a Sentinel URL must be sentinel://host:port")
    db = _first(part.path.strip("/") for part in parts) or "0"
    return FollowedUrl(
        servers=tuple((str(part.hostname), part.port or SENTINEL_PORT) for part in parts),
        name=options.get("master_name", DEFAULT_MASTER),
        redis_options={
            "db": int(db),
            "username": _first(part.username for part in parts),
            "password": _first(part.password for part in parts),
        },
        server_options={"password": options.get("sentinel_password")} | _brief(),
        bare=SEPARATOR.join(f"{SENTINEL}://{part.netloc}/{db}" for part in parts),
        tls_options={},
    )


def _of_cluster(url: str) -> FollowedUrl:
    scheme = url.partition("://")[0]
    tls = scheme == TLS_CLUSTER
    parts, options = _parts(url, ("tag", *(TLS_OPTIONS if tls else ())))
    if any(part.scheme != scheme or not part.hostname for part in parts):
        raise ValueError(f"each part of a Cluster's URL must be {scheme}://host:port")
    if any(part.path.strip("/") not in ("", "0") for part in parts):
        raise ValueError("a Cluster has database 0 only")
    tag = options.pop("tag", DEFAULT_TAG)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", tag):
        raise ValueError("tag must consist of letters, digits, '.', '_' and '-'")
    tls_options = _tls_options(options) if tls else {}
    username = _first(part.username for part in parts)
    password = _first(part.password for part in parts)
    redis_options: dict[str, Any] = {"username": username, "password": password}
    if tls:
        redis_options |= tls_options | {"ssl": True}
    login = quote(username or "", safe="") + (f":{quote(password, safe='')}" if password else "")
    login += "@" if login else ""
    hosts = (
        part.netloc.rpartition("@")[2] + ("" if part.port else f":{REDIS_PORT}") for part in parts
    )
    return FollowedUrl(
        servers=tuple((str(part.hostname), part.port or REDIS_PORT) for part in parts),
        name=tag,
        redis_options=redis_options,
        server_options=redis_options | _brief(),
        bare=SEPARATOR.join(f"{KOMBU_CLUSTER}://{login}{host}/0" for host in hosts),
        tls_options=tls_options,
    )


def _tls_options(options: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"ssl_cert_reqs": "required"} | options
    if found["ssl_cert_reqs"] not in CERT_REQS:
        raise ValueError(f"ssl_cert_reqs must be one of {', '.join(CERT_REQS)}")
    checks = options.get("ssl_check_hostname", "true")
    if checks not in ("true", "false"):
        raise ValueError("ssl_check_hostname must be true or false")
    return found | {"ssl_check_hostname": checks == "true"}


def _brief() -> dict[str, Any]:
    """Options for a connection to whoever tells where the master is: others can be asked too."""
    return {
        "socket_connect_timeout": ASK_TIMEOUT_S,
        "socket_timeout": ASK_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }


def _cut(url: str) -> tuple[list[str], str]:
    """The parts, one for each sentinel or node, and the options."""
    bare, _, query = url.partition("?")
    return bare.split(SEPARATOR) if is_followed(url) else [bare], query


def _parts(url: str, allowed: tuple[str, ...]) -> tuple[list[SplitResult], dict[str, str]]:
    """The parts and the options; raises ValueError for an option that is not ``allowed``, and for
    parts that say different things."""
    texts, query = _cut(url)
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = ", ".join(sorted(options.keys() - set(allowed)))
    if unknown:
        raise ValueError(f"unknown option {unknown}; allowed: {', '.join(allowed)}")
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
