"""The Lua scripts, each in its own file, called by name."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError

Argument = str | int | float | bytes


@cache
def _source(name: str) -> str:
    return (files("llorch_worker.broker") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


@cache
def digest(name: str) -> str:
    """What ``EVALSHA`` wants, for a pipeline; the server may answer ``NoScriptError``."""
    return hashlib.sha1(_source(name).encode()).hexdigest()


def load(client: Redis, name: str) -> None:
    """Makes the server know the script, so that its digest is enough."""
    client.script_load(_source(name))


def run_script(client: Redis, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
    """Run ``lua/<name>.lua`` in one step.

    By its digest, and by its source where a server (restarted, failed over) does not know it.
    """
    try:
        # What redis-py's own method does after some checks.
        return client.execute_command("EVALSHA", digest(name), len(keys), *keys, *arguments)
    except NoScriptError:
        return client.eval(_source(name), len(keys), *keys, *arguments)
