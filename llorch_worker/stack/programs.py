"""The three programs that ``llorch up`` and ``llorch demo`` run."""

from __future__ import annotations

import signal
from pathlib import Path

from llorch_worker.settings import Settings
from llorch_worker.stack import ports
from llorch_worker.stack.children import Program, python

REDIS = "redis"
FLOWER = "flower"

_ROOT_IS_FINE = "ignore:You're running the worker with superuser"
"""Celery warns at length; whoever runs `up` as root, in a container say, knows."""


def redis(server: Path, port: int, folder: Path) -> Program:
    """A Redis for this machine alone that keeps nothing and forgets nothing."""
    options = {
        "bind": ports.LOCALHOST,
        "port": str(port),
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
    }
    arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
    return Program(REDIS, (str(server), *arguments), death_signal=signal.SIGKILL)


def worker(name: str, device: str, settings: Settings, *, own_redis: bool) -> Program:
    """A worker on ``device``. With ``own_redis`` the Redis dies with us, and so must it."""
    return Program(
        name,
        python("-m", "llorch_worker.cli", "worker"),
        settings.model_copy(update={"device": device}).environment
        | {"PYTHONWARNINGS": _ROOT_IS_FINE},
        # With our own Redis gone there is nothing to drain to; with another's there is.
        signal.SIGKILL if own_redis else signal.SIGTERM,
    )


def flower(port: int, settings: Settings, login: str | None) -> Program:
    """Flower, for this machine alone; ``login`` is ``user:password``, None whatever ``FLOWER_*``
    in the environment says."""
    arguments = (f"--address={ports.LOCALHOST}", f"--port={port}", "--logging=error")
    return Program(
        FLOWER,
        python("-m", "celery", "-A", "tasks", "flower", *arguments),
        # In the environment, because everybody may read a command line.
        settings.environment | ({} if login is None else {"FLOWER_BASIC_AUTH": login}),
        signal.SIGKILL,
    )
