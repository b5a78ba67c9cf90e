"""The URL of a Redis that Sentinel watches over.

    sentinel://[[user]:password@]host[:port][/db][;sentinel://host[:port]...][?master_name=mymaster]

As in Celery, the sentinels are separated by semicolons, and user, password and db are those of the
Redis itself. Two options may follow: ``master_name``, by default ``mymaster``, and
``sentinel_password``, for sentinels that ask for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.backoff import NoBackoff
from redis.retry import Retry

SCHEME = "sentinel"
DEFAULT_PORT = 26379
DEFAULT_MASTER = "mymaster"
SEPARATOR = ";"
ANSWER_TIMEOUT_S = 1.0
OPTIONS = ("master_name", "sentinel_password")


def is_sentinel(url: str) -> bool:
    return url.startswith(f"{SCHEME}://")


@dataclass(frozen=True)
class SentinelUrl:
    """A parsed URL; see the module."""

    sentinels: tuple[tuple[str, int], ...]
    master_name: str
    db: int
    username: str | None
    password: str | None
    sentinel_password: str | None
    bare: str
    """The URL without its options, as Celery and kombu read it."""

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Raises ValueError for what is none; see :func:`connection.url_errors`."""
        bare, _, query = url.partition("?")
        options = dict(parse_qsl(query))
        unknown = ", ".join(sorted(options.keys() - set(OPTIONS)))
        if unknown:
            raise ValueError(f"it has {unknown}, and may have {' and '.join(OPTIONS)}")
        parts = [urlsplit(one) for one in bare.split(SEPARATOR)]
        if any(part.scheme != SCHEME or not part.hostname for part in parts):
            raise ValueError("with Sentinel, each of its parts must be sentinel://host:port")
        paths = [part.path.strip("/") for part in parts]
        db = next((path for path in paths if path), "0")
        return cls(
            sentinels=tuple((str(part.hostname), part.port or DEFAULT_PORT) for part in parts),
            master_name=options.get("master_name", DEFAULT_MASTER),
            db=int(db),
            username=_first(part.username for part in parts),
            password=_first(part.password for part in parts),
            sentinel_password=options.get("sentinel_password"),
            bare=SEPARATOR.join(f"{SCHEME}://{part.netloc}/{db}" for part in parts),
        )

    @property
    def sentinel_options(self) -> dict[str, Any]:
        """For the connections to the sentinels: where one does not answer, the next is asked."""
        options: dict[str, Any] = {
            "socket_connect_timeout": ANSWER_TIMEOUT_S,
            "socket_timeout": ANSWER_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
        }
        return options | ({"password": self.sentinel_password} if self.sentinel_password else {})

    @property
    def redis_options(self) -> dict[str, Any]:
        """For the connections to the master."""
        return {"db": self.db, "username": self.username, "password": self.password}

    @property
    def transport_options(self) -> dict[str, Any]:
        """For kombu's transport and Celery's result backend."""
        return {"master_name": self.master_name, "sentinel_kwargs": self.sentinel_options}


def _first(values: Any) -> str | None:
    found = next((value for value in values if value), None)
    return None if found is None else unquote(found)
