"""The Lua scripts, called by name.

Each script consists of four pieces: the names of keys and queues, which are defined in Python;
``lua/prelude.lua``; the parts in ``lua/parts`` that the script needs; and ``lua/<name>.lua``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis import Redis
from redis.exceptions import NoScriptError

from llorch_worker.broker import keys, message, queues

Argument = str | int | float | bytes
Reply = str | bytes
"""A string in a reply: str from our clients, bytes from kombu's and Celery's."""

_PARTS = {
    "cancel": ("lists",),
    "claim": ("lists", "bells", "message", "take", "tenants", "turns", "placing"),
    "enqueue": ("bells", "tenants", "placing"),
    "finish": ("placing",),
    "heads": ("tenants",),
    "lengths": ("tenants",),
    "purge": ("tenants",),
    "release": ("lists",),
    "reroute": ("lists",),
    "ring": ("bells", "placing"),
    "sweep": ("lists",),
}
_NAMES = {
    "LEASES": keys.LEASES,
    "DEAD_LETTERS": keys.DEAD,
    "WORKER_QUEUES": keys.WORKER_QUEUES,
    "FOLLOW_UPS": keys.FOLLOW_UPS,
    "BATCH_LEASES": keys.BATCH_LEASES,
    "WEBHOOKS": keys.WEBHOOKS,
    "CANCEL_CHANNEL": keys.CANCEL_CHANNEL,
    "FULL_SUFFIX": keys.FULL_SUFFIX,
    "HIGH_SUFFIX": queues.HIGH_SUFFIX,
    "SUSPECTS_SUFFIX": queues.SUSPECTS_SUFFIX,
    "SCHEDULED_SUFFIX": queues.SCHEDULED_SUFFIX,
    "STEP_SEPARATOR": queues.STEP_SEPARATOR,
    "TENANTS_MARK": queues.TENANTS_MARK,
    "TENANT_HEADER": message.TENANT,
    "WORKER_MARK": queues.WORKER_MARK,
    "ENQUEUED_AT": message.ENQUEUED_AT,
    "PLACE": message.PLACE,
}
_KEYS_BY_ID = (
    keys.job, keys.events, keys.result, keys.cancel, keys.bell, keys.load, keys.gateway_document,
    keys.tenants,
)  # fmt: skip


@cache
def _source(name: str) -> str:
    parts = (f"parts/{part}" for part in _PARTS.get(name, ()))
    folder = files("llorch_worker.broker") / "lua"
    texts = (
        (folder / f"{file}.lua").read_text(encoding="utf-8") for file in ("prelude", *parts, name)
    )
    return "\n".join((_names(), *texts))


def _names() -> str:
    """``LEASES``, ... and ``job_key(job_id)``, ... as Lua locals."""
    lines = [f"local {name} = '{text}'" for name, text in _NAMES.items()]
    for key in _KEYS_BY_ID:
        before, after = key("@").split("@")
        lines.append(
            f"local function {key.__name__}_key(id) return '{before}' .. id .. '{after}' end"
        )
    return "\n".join(lines)


@cache
def digest(name: str) -> str:
    """The arguments of ``EVALSHA``, for a pipeline; the server may answer ``NoScriptError``."""
    return hashlib.sha1(_source(name).encode()).hexdigest()


def load(client: Redis, name: str) -> None:
    """Loads the script into the server, so that its digest is enough."""
    client.script_load(_source(name))


def run_script(
    client: Redis, name: str, arguments: Sequence[Argument], lists: Sequence[str] = ()
) -> Any:
    """Runs ``lua/<name>.lua`` in one step; ``lists`` are its ``KEYS``.

    After a restart or a failover the server does not know the digest; it then gets the source.
    """
    try:
        return client.evalsha(digest(name), len(lists), *lists, *arguments)
    except NoScriptError:
        return client.eval(_source(name), len(lists), *lists, *arguments)


async def run_script_async(
    client: redis.asyncio.Redis,
    name: str,
    arguments: Sequence[Argument],
    lists: Sequence[str] = (),
) -> Any:
    """:func:`run_script` for asyncio."""
    # redis-py's annotations cover all its clients at once.
    server: Any = client
    try:
        return await server.evalsha(digest(name), len(lists), *lists, *arguments)
    except NoScriptError:
        return await server.eval(_source(name), len(lists), *lists, *arguments)


def text(reply: Reply) -> str:
    return reply.decode() if isinstance(reply, bytes) else reply
